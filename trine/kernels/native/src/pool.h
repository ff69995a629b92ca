// Threads that work on one thing together. Between calls they look for work for a moment, then sleep. A call does not
// wait for threads that have not begun with it: whoever calls can do everything alone, and they help as they come.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace TRINE_ISA {

// The i-th look at something that is not there yet.
static inline void wait(int i) {
  if (i < 2000) {  // some tens of microseconds; then another process may have the core
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  } else {
    std::this_thread::yield();
  }
}

class Pool {
 public:
  explicit Pool(int threads) : count(threads < 1 ? 1 : threads) {
    for (int i = 1; i < count; i++) helpers.emplace_back([this, i] { serve(i); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      ended = true;
    }
    woken.notify_all();
    for (auto& helper : helpers) helper.join();
  }

  // Runs `call(thread)` on the caller, as thread 0, and on whoever comes before that has ended.
  void run(const std::function<void(int)>& call) {
    if (count == 1) return call(0);
    current = &call;
    open.fetch_add(1);  // odd: there is something
    if (asleep.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex);
      woken.notify_all();
    }
    call(0);
    open.fetch_add(1);
    for (int i = 0; inside.load() > 0; i++) wait(i);
  }

  const int count;

 private:
  void serve(int index) {
    unsigned seen = 0;
    while (true) {
      for (int i = 0; fresh(seen) == 0 && i < 4000; i++) wait(i / 2);
      unsigned now = fresh(seen);
      if (!now) {
        std::unique_lock<std::mutex> lock(mutex);
        asleep.fetch_add(1);
        woken.wait(lock, [&] { return ended || fresh(seen); });
        asleep.fetch_sub(1);
        if (ended) return;
        continue;
      }
      inside.fetch_add(1);
      if (open.load() == now) (*current)(index);
      inside.fetch_sub(1);
      seen = now;
    }
  }

  // The call that is on and was not seen; 0 if there is none.
  unsigned fresh(unsigned seen) const {
    const unsigned now = open.load();
    return now % 2 && now != seen ? now : 0;
  }

  std::vector<std::thread> helpers;
  std::mutex mutex;
  std::condition_variable woken;
  const std::function<void(int)>* current = nullptr;
  std::atomic<unsigned> open{0};
  std::atomic<int> inside{0}, asleep{0};
  bool ended = false;
};

}  // namespace TRINE_ISA
