"""The radix tree against a dictionary from fronts of tokens to pages, and its corners by hand."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trine.cache.pages import PagePool
from trine.cache.tree import Node, Tree
from trine.core.types import Group

SIZE = 2  # tokens in a page
Front = tuple[int, ...]


def text(tokens: list[int] | Front) -> bytes:
    return array("i", tokens).tobytes()


def make(*groups: Group) -> Tree:
    return Tree(SIZE, [PagePool(group, SIZE) for group in groups])


def take(tree: Tree, count: int, group: int = 0) -> list[int]:
    pool = tree.pools[group]
    if len(pool.free) < count:
        tree.evict(group, count - len(pool.free))
    return [pool.free.pop() for _ in range(count)]


def put(tree: Tree, tokens: list[int], space: str = "") -> Node:
    """Insert what the tree lacks of `tokens` (whole pages), with free pages; gives its locked node."""
    key = text(tokens)
    node, had = tree.match(tree.root(space), key, len(tokens) // SIZE)
    node = tree.cut(node, had)
    tree.lock(node)
    count = len(tokens) // SIZE - had
    tables = [take(tree, count, group) for group in range(len(tree.pools))]
    end, _ = tree.insert(node, key[had * tree.step :], tables)
    tree.lock(end, node)
    return end


def content(tree: Tree) -> dict[Front, int]:
    """By space and tokens from the root: the page of group 0 that holds the end of them."""
    found: dict[Front, int] = {}
    stack: list[tuple[Node, bytes, int]] = [(root, b"", int(name or 0)) for name, root in tree.roots.items()]
    while stack:
        node, above, space = stack.pop()
        for index, page in enumerate(node.pages[0], 1):
            front = array("i", above + node.key[: index * tree.step]).tolist()
            assert (space, *front) not in found
            found[(space, *front)] = page
        key = above + (node.key if node.parent else b"")
        stack += [(child, key, space) for child in node.children.values()]
    return found


class TreeMachine(RuleBasedStateMachine):
    """Sequences come, hold what they match, add pages, and go; pages are evicted in between."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = make(Group(17))
        self.model: dict[Front, int] = {}
        self.held: list[tuple[Node, Front]] = []

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    spaces = st.integers(0, 1)

    def longest(self, space: int, tokens: list[int], most: int) -> int:
        count = 0
        while count < most and (space, *tokens[: (count + 1) * SIZE]) in self.model:
            count += 1
        return count

    @rule(tokens=tokens, space=spaces)
    def hold(self, tokens: list[int], space: int) -> None:
        """Match, then add pages for the rest, as far as there are any."""
        tree, whole = self.tree, len(tokens) // SIZE
        node, count = tree.match(tree.root(str(space)), text(tokens), whole)
        assert count == self.longest(space, tokens, whole)
        node = tree.cut(node, count)
        tree.lock(node)
        fronts = [(space, *tokens[: (i + 1) * SIZE]) for i in range(whole)]
        assert tree.path(node, 0) == [self.model[f] for f in fronts[:count]]
        more = min(whole - count, tree.pools[0].room)
        if more:
            pages = take(tree, more)
            self.settle()
            key = text(tokens[count * SIZE : (count + more) * SIZE])
            end, had = tree.insert(node, key, [pages])
            assert not had
            tree.lock(end, node)
            node = end
            self.model |= dict(zip(fronts[count:], pages, strict=False))
        self.held.append((node, (space, *tokens[: node.end * SIZE])))

    @rule(tokens=tokens, space=spaces)
    def near(self, tokens: list[int], space: int) -> None:
        """A match inside a page finds the child that shares most."""
        tree, whole = self.tree, len(tokens) // SIZE
        if (root := tree.roots.get(str(space))) is None:
            return
        node, count = tree.match(root, text(tokens), whole)
        node = tree.cut(node, count)
        rest = tokens[count * SIZE :]
        child, shared = tree.near(node, text(rest))
        firsts = [f[1 + count * SIZE :] for f in self.model if len(f) == 1 + (count + 1) * SIZE]
        firsts = [f for f in firsts if (space, *tokens[: count * SIZE], *f) in self.model]
        assert shared == max([common(f, rest) for f in firsts], default=0)
        assert (
            child is None
            or child.pages[0][0]
            == self.model[(space, *tokens[: count * SIZE], *array("i", child.key[: tree.step]).tolist())]
        )

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        node, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.unlock(node)

    @rule(want=st.integers(1, 5))
    def evict(self, want: int) -> None:
        pool = self.tree.pools[0]
        before, idle = len(pool.free), pool.idle
        self.tree.evict(0, want)
        assert len(pool.free) - before == min(want, idle), "it gives what is wanted, if it can"
        self.settle()

    def settle(self) -> None:
        """What eviction may take away: ends that nobody holds."""
        now = content(self.tree)
        gone = self.model.keys() - now.keys()
        for _, front in self.held:
            kept = [front[: 1 + i] for i in range(SIZE, len(front), SIZE)]
            assert not gone.intersection(kept), "a page that is held was evicted"
        self.model = {front: page for front, page in self.model.items() if front not in gone}

    @invariant()
    def same(self) -> None:
        tree = self.tree
        assert content(tree) == self.model
        assert all(len(f) == 1 + SIZE or f[:-SIZE] in self.model for f in self.model), "a gap"
        assert sorted(tree.pools[0].free + list(self.model.values())) == list(range(1, 17))
        held = {front[: 1 + i] for _, front in self.held for i in range(SIZE, len(front), SIZE)}
        assert tree.pools[0].idle == len(self.model.keys() - held)


def common(a: Front, b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_the_least_recently_used_goes_first_and_gives_up_its_tail_first() -> None:
    tree = make(Group(20))
    old, new = put(tree, [1, 1, 1, 2, 1, 3]), put(tree, [2, 2, 2, 3])
    tree.unlock(old)
    tree.unlock(new)
    tree.evict(0, 2)
    assert tree.match(tree.root(""), text([1, 1, 1, 2, 1, 3]), 3)[1] == 1
    assert tree.match(tree.root(""), text([2, 2, 2, 3]), 2)[1] == 2
    again, _ = tree.match(tree.root(""), text([1, 1]), 1)
    tree.lock(again)
    tree.unlock(again)  # used again: now the other is the older one
    tree.evict(0, 1)
    assert tree.match(tree.root(""), text([2, 2, 2, 3]), 2)[1] == 1
    assert tree.match(tree.root(""), text([1, 1]), 1)[1] == 1


def test_a_parent_can_be_evicted_once_its_children_are_gone() -> None:
    tree = make(Group(20))
    for node in [put(tree, [1, 1, 7, 7]), put(tree, [1, 1, 8, 8])]:
        tree.unlock(node)
    tree.evict(0, 3)
    assert tree.roots == {}, "an empty space is forgotten"
    assert len(tree.pools[0].free) == 19


def test_an_edge_is_cut_where_two_texts_part_and_holders_keep_their_end() -> None:
    tree = make(Group(20))
    low = put(tree, [1, 1, 2, 2, 3, 3, 4, 4])
    pages = tree.path(low, 0)
    side = put(tree, [1, 1, 2, 2, 9, 9])
    assert low.parent is side.parent and low.parent is not None
    assert (low.parent.end, low.end, low.locks, low.parent.locks) == (2, 4, 1, 2)
    assert tree.path(low, 0) == pages
    assert tree.path(low, 0, 3) == pages[3:]


def test_a_leaf_that_only_its_holder_has_grows() -> None:
    tree = make(Group(20))
    node = put(tree, [1, 1, 2, 2])
    end, had = tree.insert(node, text([3, 3]), [take(tree, 1)])
    assert end is node and had == []
    other, count = tree.match(tree.root(""), text([1, 1, 2, 2, 3, 3]), 3)
    assert other is node and count == 3
    tree.lock(node)  # a second holder: now it must not change under them
    end, _ = tree.insert(node, text([4, 4]), [take(tree, 1)])
    assert end is not node


def test_spaces_have_nothing_in_common() -> None:
    tree = make(Group(20))
    put(tree, [1, 1], "a")
    assert tree.match(tree.root("b"), text([1, 1]), 1)[1] == 0
    assert tree.match(tree.root("\ud800"), text([1, 1]), 1)[1] == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_match_is_the_longest_whose_window_is_there(seed: int) -> None:
    """Against trying all lengths, with pages of a window group missing at random."""
    rng = random.Random(seed)
    tree = make(Group(60), Group(60, window=rng.choice([1, 2, 3, 4, 6])))
    window = tree.pools[1].window
    tokens = [rng.randrange(3) for _ in range(24)]
    for end in (8, 16, 24):
        tree.unlock(put(tree, tokens[:end]))
    path: list[int] = []
    for node in sorted((n for n in tree.nodes() if n.parent), key=lambda n: n.end):
        node.pages[1] = [0 if rng.random() < 0.4 else page for page in node.pages[1]]
        path += node.pages[1]
    for most in range(13):
        want = max(n for n in range(most + 1) if all(path[max(0, n - window) : n]))
        node, count = tree.match(tree.root(""), text(tokens), most)
        assert count == want
        assert node.start < count <= node.end or count == node.end == 0


def test_a_window_group_gives_up_pages_of_inner_nodes_first() -> None:
    tree = make(Group(20), Group(20, window=2))
    low = put(tree, [1, 1, 2, 2, 3, 3])
    side = put(tree, [1, 1, 9, 9])
    tree.pools[1].refs[side.pages[1][0]] = 1
    tree.unlock(low)
    for node in tree.nodes():
        tree.idle(node, 1)
    tree.pools[1].idle = 3
    tree.evict(1, 1)
    assert tree.roots[""].children[text([1, 1])].pages == [[tree.path(low, 0)[0]], [0]]
    assert tree.match(tree.root(""), text([1, 1, 2, 2, 3, 3]), 3)[1] == 3, "the end still has its window"


def test_without_full_groups_nothing_is_kept_that_no_match_can_reach() -> None:
    tree = make(Group(20, window=2))
    for tokens in ([1, 1, 2, 2, 3, 3], [1, 1, 4, 4]):
        tree.unlock(put(tree, tokens))
    for node in tree.nodes():
        tree.idle(node, 0)
    tree.pools[0].idle = 4
    tree.evict(0, 4)
    assert tree.size == 0 and tree.roots == {}
    assert len(tree.pools[0].free) == 19


def test_heaps_do_not_fill_with_nodes_that_are_gone() -> None:
    tree = make(Group(20), Group(20, window=2))
    for number in range(2000):
        node = put(tree, [number, number])
        tree.idle(node, 1)
        tree.unlock(node)
        tree.pools[1].idle += 1
        tree.evict(0, 1)
    assert max(map(len, tree.heaps)) < 200
