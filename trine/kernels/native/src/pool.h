// Threads that work on one thing together: a call runs on all of them, they meet at barriers, and parts are handed
// out as they are asked for. Between calls they look for work for a moment, then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace TRINE_ISA {

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int count) : count(count < 1 ? 1 : count) {
    for (int i = 1; i < this->count; i++) threads.emplace_back([this, i] { serve(i); });
  }

  ~Pool() {
    work(nullptr);
    for (auto& thread : threads) thread.join();
  }

  // Runs `call(thread)` on all of them, the caller being thread 0, and returns when all have ended.
  void run(const std::function<void(int)>& call) {
    if (count == 1) return call(0);
    work(&call);
    call(0);
    barrier();
  }

  // Until all are here. Only inside of a call.
  void barrier() {
    if (count == 1) return;
    uint32_t now = phase.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
      arrived.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; phase.load(std::memory_order_acquire) == now; i++) i < PATIENCE ? relax() : std::this_thread::yield();
  }

  const int count;

 private:
  static constexpr int PATIENCE = 4000;  // looks, some tens of microseconds, before another process gets the core

  void work(const std::function<void(int)>* call) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      current = call;
      order.fetch_add(1, std::memory_order_release);
    }
    if (asleep.load(std::memory_order_acquire)) woken.notify_all();
  }

  void serve(int index) {
    uint32_t seen = 0;
    while (true) {
      for (int i = 0; order.load(std::memory_order_acquire) == seen && i < PATIENCE; i++) relax();
      if (order.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex);
        asleep.fetch_add(1);
        woken.wait(lock, [&] { return order.load(std::memory_order_acquire) != seen; });
        asleep.fetch_sub(1);
      }
      seen++;
      if (!current) return;
      (*current)(index);
      barrier();
    }
  }

  std::vector<std::thread> threads;
  std::mutex mutex;
  std::condition_variable woken;
  const std::function<void(int)>* current = nullptr;
  std::atomic<uint32_t> order{0}, phase{0};
  std::atomic<int> arrived{0}, asleep{0};
};

}  // namespace TRINE_ISA
