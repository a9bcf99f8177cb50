// SPDX-License-Identifier: Apache-2.0
// Runs one cluster of a transpiled PTX kernel: a fiber a thread, switched where PTX threads wait for each other.
//
// Order between waiting points is random, CTAs start late, and asynchronous stores arrive late and in any order. Every access is checked:
// bounds, alignment, shared memory of a CTA that has exited. Lanes that meet in a warp instruction must meet in the same.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace emu {

constexpr uint32_t SHARED_BASE = 0x400;     // of a CTA's own window
constexpr uint32_t CLUSTER_BIT = 0x80000000;  // addresses that mapa returns
constexpr int RANK_SHIFT = 24;
constexpr int MAX_BARRIERS = 16;
constexpr size_t STACK_BYTES = 96 << 10;

struct Range {
  uint64_t begin, end;
  bool writable;
};

struct Mbarrier {
  int expected = 0, pending = 0;
  int64_t tx = 0;
  uint64_t phase = 0;
};

struct WarpMeeting {
  uint64_t generation = 0;
  int arrived = 0, site = -1;
  uint32_t in[32], out[32];
};

struct CtaBarrier {
  uint64_t generation = 0;
  int arrived = 0;
};

struct Cta {
  std::vector<uint8_t> shared;
  std::vector<WarpMeeting> warps;
  CtaBarrier barriers[MAX_BARRIERS];
  std::vector<Mbarrier> mbarriers;  // by offset / 8
  int running = 0;
  int start = 0;  // pass of the scheduler from which it runs: CTAs of a cluster do not start together
};

struct Fiber {
  void* sp = nullptr;
  int cta = 0, tid = 0;
  bool done = false;
  const uint64_t* wait_on = nullptr;  // runs again when the value differs
  uint64_t wait_value = 0;
  uint64_t cluster_phase = 0;
  int site = 0;
};

struct Machine {
  int cluster, threads, first_block;
  const uint64_t* params;
  std::vector<Range> ranges;
  std::vector<Cta> ctas;
  std::vector<Fiber> fibers;
  std::vector<std::function<void()>> in_flight;
  uint64_t cluster_generation = 0;
  int cluster_arrived = 0;
  std::string error;
  std::mt19937 random;
  void* scheduler_sp = nullptr;
  Fiber* now = nullptr;
};

extern Machine* m;

extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

inline void to_scheduler() { emu_switch(&m->now->sp, m->scheduler_sp); }

// Ends the run with a message; does not return.
[[noreturn]] inline void fail(const std::string& what) {
  if (m->error.empty())
    m->error = "CTA " + std::to_string(m->now->cta) + " thread " + std::to_string(m->now->tid) + " line " +
               std::to_string(m->now->site) + ": " + what;
  for (;;) to_scheduler();
}

inline void wait_until_changed(const uint64_t* value, uint64_t from) {
  m->now->wait_on = value;
  m->now->wait_value = from;
  to_scheduler();
}

// ---- memory
inline uint8_t* global(uint64_t addr, int bytes, bool write) {
  if (addr % bytes) fail("misaligned global access");
  for (const Range& r : m->ranges)
    if (addr >= r.begin && addr + bytes <= r.end) {
      if (write && !r.writable) fail("store to a read-only tensor");
      return reinterpret_cast<uint8_t*>(addr);
    }
  char text[64];
  snprintf(text, sizeof text, "global %s of %d bytes out of bounds", write ? "store" : "load", bytes);
  fail(text);
}

inline uint8_t* shared_at(int cta, uint32_t offset, int bytes) {
  if (offset % bytes) fail("misaligned shared access");
  if (offset + bytes > m->ctas[cta].shared.size()) fail("shared access out of bounds");
  return m->ctas[cta].shared.data() + offset;
}

inline uint8_t* own_shared(uint32_t addr, int bytes) {
  if (addr & CLUSTER_BIT) fail("a cluster address in an access to own shared memory");
  return shared_at(m->now->cta, addr - SHARED_BASE, bytes);
}

inline int rank_of(uint32_t addr) {
  if (!(addr & CLUSTER_BIT)) fail("not an address from mapa");
  int rank = (addr & ~CLUSTER_BIT) >> RANK_SHIFT;
  if (rank >= m->cluster) fail("no such CTA in the cluster");
  if (m->ctas[rank].running == 0) fail("shared memory of a CTA that has exited");
  return rank;
}

inline uint32_t offset_of(uint32_t addr) { return (addr & ((1u << RANK_SHIFT) - 1)) - SHARED_BASE; }
inline uint8_t* cluster_shared(uint32_t addr, int bytes) { return shared_at(rank_of(addr), offset_of(addr), bytes); }
inline uint32_t mapa(uint32_t addr, uint32_t rank) { return CLUSTER_BIT | (rank << RANK_SHIFT) | addr; }

template <class T>
T load(const uint8_t* p) {
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
void store(uint8_t* p, T v) {
  memcpy(p, &v, sizeof v);
}
inline uint32_t fetch_add(uint8_t* p, uint32_t v) {
  uint32_t old = load<uint32_t>(p);
  store<uint32_t>(p, old + v);
  return old;
}

// ---- waiting for each other
template <class F>
uint32_t meet(int site, uint32_t value, F result) {
  WarpMeeting& w = m->ctas[m->now->cta].warps[m->now->tid / 32];
  int lane = m->now->tid % 32;
  if (w.arrived == 0) w.site = site;
  if (w.site != site) fail("lanes of a warp meet in different instructions");
  w.in[lane] = value;
  if (++w.arrived == 32) {
    for (int i = 0; i < 32; i++) w.out[i] = result(w.in, i);
    w.arrived = 0;
    w.generation++;
  } else {
    wait_until_changed(&w.generation, w.generation);
  }
  return w.out[lane];
}

inline void bar(int id, int count, bool wait) {
  CtaBarrier& b = m->ctas[m->now->cta].barriers[id];
  b.arrived++;
  if (b.arrived > count) fail("more threads at a barrier than it counts");
  if (b.arrived == count) {
    b.arrived = 0;
    b.generation++;
  } else if (wait) {
    wait_until_changed(&b.generation, b.generation);
  }
}

inline void cluster_arrive() {
  m->now->cluster_phase = m->cluster_generation;
  if (++m->cluster_arrived == m->cluster * m->threads) {
    m->cluster_arrived = 0;
    m->cluster_generation++;
  }
}
inline void cluster_wait() {
  if (m->cluster_generation == m->now->cluster_phase)
    wait_until_changed(&m->cluster_generation, m->now->cluster_phase);
}

inline Mbarrier& mbarrier(int cta, uint32_t offset) {
  shared_at(cta, offset, 8);
  return m->ctas[cta].mbarriers[offset / 8];
}
inline void settle(Mbarrier& b) {
  if (b.pending == 0 && b.tx == 0) {
    b.pending = b.expected;
    b.phase++;
  }
}
inline void mbarrier_init(uint32_t addr, int count) {
  if (addr & CLUSTER_BIT) fail("mbarrier.init on another CTA");
  Mbarrier& b = mbarrier(m->now->cta, addr - SHARED_BASE);
  b = Mbarrier();
  b.expected = b.pending = count;
}
inline void mbarrier_arrive_expect(uint32_t addr, int64_t bytes) {
  bool remote = addr & CLUSTER_BIT;
  Mbarrier& b = remote ? mbarrier(rank_of(addr), offset_of(addr)) : mbarrier(m->now->cta, addr - SHARED_BASE);
  if (b.pending <= 0) fail("arrival at an mbarrier that expects none");
  b.tx += bytes;
  b.pending--;
  settle(b);
}
inline bool mbarrier_wait(uint32_t addr, uint32_t parity) {
  Mbarrier& b = mbarrier(m->now->cta, addr - SHARED_BASE);
  if ((b.phase & 1) == parity) wait_until_changed(&b.phase, b.phase);
  return true;
}
// Lands later: `land` is called with the place.
inline void fly(uint32_t addr, int bytes, uint32_t bar_addr, std::function<void(uint8_t*)> land) {
  int rank = rank_of(addr);
  if (rank_of(bar_addr) != rank) fail("an asynchronous store and its mbarrier lie in different CTAs");
  uint8_t* p = cluster_shared(addr, bytes);
  Mbarrier* b = &mbarrier(rank, offset_of(bar_addr));
  m->in_flight.push_back([=] {
    land(p);
    b->tx -= bytes;
    settle(*b);
  });
}
inline void store_async(uint32_t addr, std::vector<uint32_t> words, uint32_t bar_addr) {
  fly(addr, int(4 * words.size()), bar_addr, [=](uint8_t* p) { memcpy(p, words.data(), 4 * words.size()); });
}
inline void reduce_async(uint32_t addr, uint32_t value, uint32_t bar_addr) {
  fly(addr, 4, bar_addr, [=](uint8_t* p) { fetch_add(p, value); });
}

// ---- arithmetic on pairs of BF16
inline float bf16(uint32_t bits) {
  uint32_t word = bits << 16;
  float f;
  memcpy(&f, &word, 4);
  return f;
}
inline uint32_t max_nan(uint32_t a, uint32_t b) {
  float x = bf16(a), y = bf16(b);
  if (x != x || y != y) return 0x7fff;
  if (x == y) return (a & 0x8000) ? b : a;  // -0 below +0
  return x > y ? a : b;
}
inline uint32_t max_nan_pair(uint32_t a, uint32_t b) {
  return max_nan(a & 0xffff, b & 0xffff) | (max_nan(a >> 16, b >> 16) << 16);
}
inline bool geu(uint32_t a, uint32_t b) { return !(bf16(a) < bf16(b)); }
inline bool gtu(uint32_t a, uint32_t b) { return !(bf16(a) <= bf16(b)); }
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t select) {
  uint64_t bytes = a | (uint64_t(b) << 32);
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) out |= uint32_t((bytes >> (8 * ((select >> (4 * i)) & 7))) & 0xff) << (8 * i);
  return out;
}
template <class T>
T shift_left(T v, uint32_t n) {
  return n >= 8 * sizeof(T) ? 0 : T(v << n);
}
template <class T>
T shift_right(T v, uint32_t n) {
  if (n >= 8 * sizeof(T)) n = 8 * sizeof(T) - 1, v = v < 0 ? T(-1) : T(0);
  return v >> n;
}

}  // namespace emu
