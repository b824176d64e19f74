// Threads that work through numbered phases together. A phase is over when its items are done, not when every thread
// has arrived: a thread the kernel has taken off its core holds nothing up unless it is inside an item.
// Knows nothing of models.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>
#include <system_error>
#include <thread>
#include <vector>

namespace baton {

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

static inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

class Pool {
public:
    // What is called for each item. `first` says that it is the thread's first item of this phase.
    using Work = void (*)(void* self, int phase, int item, int thread, bool first);

    Pool(int threads, int phases, Work work, void* self)
        : threads_(threads), work_(work), self_(self), tickets_(size_t(phases) * threads), left_(phases) {
        for (int thread = 1; thread < threads; ++thread) {
            try {
                workers_.emplace_back([this, thread] { serve(thread); });
            } catch (const std::system_error&) {
                break;  // Items of a thread that is not there are taken by the others.
            }
        }
    }

    ~Pool() {
        stop_.store(true);
        generation_.fetch_add(1);
        wake(&generation_);
        for (std::thread& worker : workers_) worker.join();
    }

    // Says how many items a phase has in the next run. Each thread begins with an equal, contiguous share of them.
    void plan(int phase, int items) {
        uint32_t next = generation_.load(std::memory_order_relaxed) + 1;
        for (int t = 0; t < threads_; ++t) {
            uint64_t begin = uint64_t(items) * t / threads_, end = uint64_t(items) * (t + 1) / threads_;
            ticket(phase, t).store(uint64_t(next & 0xffff) << 48 | begin << 24 | end, std::memory_order_relaxed);
        }
        left_[phase].stride.store(1, std::memory_order_relaxed);
        left_[phase].word.store(uint64_t(next) << 32 | uint32_t(items), std::memory_order_relaxed);
    }

    // Says how many items a phase has while a run is under way: an item of an earlier phase calls it. The threads are in
    // `groups`, thread t in group t % groups. The items before ends[0] are for the first group, and so on: a thread takes
    // those of its own group only.
    void replan(int phase, const int* ends, int groups) {
        uint32_t now = generation_.load(std::memory_order_relaxed);
        for (int t = 0; t < threads_; ++t) {
            int group = t % groups, size = (threads_ - group + groups - 1) / groups, index = t / groups;
            uint64_t first = group ? ends[group - 1] : 0, items = ends[group] - first;
            uint64_t begin = first + items * index / size, end = first + items * (index + 1) / size;
            ticket(phase, t).store(uint64_t(now & 0xffff) << 48 | begin << 24 | end, std::memory_order_relaxed);
        }
        left_[phase].stride.store(groups, std::memory_order_relaxed);
        left_[phase].word.store(uint64_t(now) << 32 | uint32_t(ends[groups - 1]), std::memory_order_relaxed);
    }

    // Runs all phases, in order; every phase has been planned. The calling thread works too, and can do all of it.
    void run() {
        uint32_t generation = generation_.fetch_add(1) + 1;
        if (asleep_.load() > 0) wake(&generation_);
        run_phases(generation, 0);
    }

private:
    // A ticket word is generation:16 | next:24 | end:24, so that a thread late from an earlier run cannot take an item.
    struct alignas(64) Line {
        std::atomic<uint64_t> word{0};
        std::atomic<int> stride{1};  // Of the threads that share the items of a phase.
    };

    // Spinning past this is waiting for a thread that has lost its core; sleeping lets it have ours.
    static constexpr int64_t kSpinNs = 40000;

    std::atomic<uint64_t>& ticket(int phase, int thread) { return tickets_[size_t(phase) * threads_ + thread].word; }

    int claim(int phase, int owner, uint32_t generation) {
        std::atomic<uint64_t>& word = ticket(phase, owner);
        uint64_t seen = word.load(std::memory_order_relaxed);
        for (;;) {
            uint32_t next = seen >> 24 & 0xffffff, end = seen & 0xffffff;
            if (seen >> 48 != (generation & 0xffff) || next >= end) return -1;
            if (word.compare_exchange_weak(seen, seen + (1u << 24), std::memory_order_acquire)) return int(next);
        }
    }

    void run_phases(uint32_t generation, int thread) {
        for (int phase = 0; phase < int(left_.size()); ++phase) {
            uint32_t done = 0;
            // Where threads are missing, the others do their work.
            int stride = int(workers_.size()) + 1 < threads_ ? 1 : left_[phase].stride.load(std::memory_order_relaxed);
            for (int step = 0; step < threads_; ++step) {
                int owner = (thread + step) % threads_, item;
                if (owner % stride != thread % stride) continue;
                while ((item = claim(phase, owner, generation)) >= 0) work_(self_, phase, item, thread, done++ == 0);
            }
            std::atomic<uint64_t>& left = left_[phase].word;
            if (done && uint32_t(left.fetch_sub(done) - done) == 0 && asleep_.load() > 0) wake(&left);
            if (!wait_done(left, generation)) return;
        }
    }

    // Returns false when this run is over.
    bool wait_done(std::atomic<uint64_t>& left, uint32_t generation) {
        int64_t deadline = 0;
        for (int spins = 1;; ++spins) {
            uint64_t seen = left.load(std::memory_order_acquire);
            if (uint32_t(seen >> 32) != generation) return false;
            if (uint32_t(seen) == 0) return true;
            if (keep_spinning(spins, deadline)) continue;
            asleep_.fetch_add(1);
            sleep(&left, uint32_t(seen));
            asleep_.fetch_sub(1);
        }
    }

    void serve(int thread) {
        uint32_t last = 0;
        for (;;) {
            int64_t deadline = 0;
            uint32_t seen;
            for (int spins = 1; (seen = generation_.load(std::memory_order_acquire)) == last; ++spins) {
                if (keep_spinning(spins, deadline)) continue;
                asleep_.fetch_add(1);
                sleep(&generation_, last);
                asleep_.fetch_sub(1);
            }
            if (stop_.load()) return;
            last = seen;
            run_phases(seen, thread);
        }
    }

    static bool keep_spinning(int spins, int64_t& deadline) {
        relax();
        if (spins % 64) return true;
        int64_t now = now_ns();
        if (deadline == 0) deadline = now + kSpinNs;
        return now < deadline;
    }

    // The kernel looks at the low half of a 64-bit word: both supported platforms are little-endian.
    static void sleep(void* word, uint32_t expected) {
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
    }
    static void wake(void* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

    const int threads_;
    const Work work_;
    void* const self_;
    std::vector<Line> tickets_, left_;
    std::vector<std::thread> workers_;
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
};

}  // namespace baton
