// The pool behind parallel_for: a queue of offers to help, threads that take them, and one counter per loop.
//
// Contract: see threads.h. A loop lives in a shared_ptr, so that a helper which arrives after the loop has ended finds
// the counter exhausted and touches nothing of the caller's. Trade-off: pool threads are never joined; the pool is
// leaked on purpose, because threads of a host program may still call when static objects are destroyed.
#include "cpu/threads.h"

#include <sched.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace streammoe::cpu {
namespace {

// Default floating point mode for the life of the object (x86: MXCSR; elsewhere nothing sets another one).
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#else
  DefaultFloatMode() {}
#endif
};

thread_local bool inside_loop = false;

struct Loop {
  Loop(int64_t tasks, const std::function<void(int64_t)>& task) : n(tasks), body(&task) {}

  // Claims and runs tasks until none is left.
  void work() {
    const DefaultFloatMode mode;
    inside_loop = true;
    int64_t ran = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n; ++ran) (*body)(i);
    inside_loop = false;
    if (ran == 0) return;
    const std::lock_guard<std::mutex> lock(mutex);  // publishes what the bodies wrote to the caller
    done += ran;
    if (done == n) all_done.notify_one();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done == n; });
  }

  const int64_t n;
  const std::function<void(int64_t)>* const body;  // the caller's; valid while a task is unfinished
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t done = 0;
};

class Pool {
 public:
  void offer(const std::shared_ptr<Loop>& loop, int helpers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int i = 0; i < helpers; ++i) offers_.push_back(loop);
      grow(helpers);
    }
    if (helpers == 1) {
      offered_.notify_one();
    } else {
      offered_.notify_all();
    }
  }

  // Takes back what nobody took, so that ended loops do not pile up while the threads are busy elsewhere.
  void withdraw(const std::shared_ptr<Loop>& loop) {
    const std::lock_guard<std::mutex> lock(mutex_);
    offers_.erase(std::remove(offers_.begin(), offers_.end(), loop), offers_.end());
  }

 private:
  // Enough threads for the waiting offers, but no more than the machine runs at once, or than this loop asks for.
  void grow(int helpers) {
    const int limit = std::max(helpers, default_threads() - 1);
    const auto offers = static_cast<int64_t>(offers_.size());
    while (num_threads_ < limit && num_threads_ - num_busy_ < offers) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // out of threads: the callers do the work
      }
      ++num_threads_;
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      offered_.wait(lock, [this] { return !offers_.empty(); });
      const std::shared_ptr<Loop> loop = std::move(offers_.front());
      offers_.pop_front();
      ++num_busy_;
      lock.unlock();
      loop->work();
      lock.lock();
      --num_busy_;
    }
  }

  std::mutex mutex_;
  std::condition_variable offered_;
  std::deque<std::shared_ptr<Loop>> offers_;
  int num_threads_ = 0, num_busy_ = 0;
};

Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

int default_threads() {
  static const int count = [] {
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0) return std::max(1, CPU_COUNT(&mask));
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));  // more cores than cpu_set_t holds
  }();
  return count;
}

void parallel_for(int threads, int64_t n, const std::function<void(int64_t)>& body) {
  if (n <= 0) return;
  if (inside_loop) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  const auto loop = std::make_shared<Loop>(n, body);
  const int helpers = static_cast<int>(std::min<int64_t>(threads, n)) - 1;
  if (helpers > 0) pool().offer(loop, helpers);
  loop->work();
  if (helpers <= 0) return;
  loop->wait();
  pool().withdraw(loop);
}

}  // namespace streammoe::cpu
