// SPDX-License-Identifier: Apache-2.0
// The scheduler; included after the transpiled kernel, `void kernel()`.
#pragma once
#include <algorithm>
#include <numeric>

namespace emu {

Machine* m;

inline void fiber_main() {
  kernel();
  m->now->done = true;
  m->ctas[m->now->cta].running--;
  for (;;) to_scheduler();
}

inline bool deliver(bool all) {
  bool any = false;
  std::vector<std::function<void()>> late;
  std::shuffle(m->in_flight.begin(), m->in_flight.end(), m->random);
  std::vector<std::function<void()>> flying;
  flying.swap(m->in_flight);
  for (auto& one : flying) {
    if (all || m->random() % 2) {
      one();
      any = true;
    } else {
      late.push_back(std::move(one));
    }
  }
  m->in_flight = std::move(late);
  return any;
}

inline void run_cluster(std::vector<char>& stacks) {
  int count = m->cluster * m->threads;
  m->ctas.assign(m->cluster, Cta());
  m->fibers.assign(count, Fiber());
  for (int c = 0; c < m->cluster; c++) {
    Cta& cta = m->ctas[c];
    cta.shared.resize(m->params[0]);
    for (auto& byte : cta.shared) byte = uint8_t(m->random());
    cta.mbarriers.resize(cta.shared.size() / 8 + 1);
    cta.warps.resize(m->threads / 32);
    cta.running = m->threads;
    cta.start = m->random() % 2 ? 0 : m->random() % 300;
  }
  for (int i = 0; i < count; i++) {
    Fiber& f = m->fibers[i];
    f.cta = i / m->threads;
    f.tid = i % m->threads;
    uint64_t top = reinterpret_cast<uint64_t>(stacks.data() + (i + 1) * STACK_BYTES) & ~uint64_t(15);
    uint64_t* sp = reinterpret_cast<uint64_t*>(top) - 8;
    memset(sp, 0, 64);
    sp[6] = reinterpret_cast<uint64_t>(&fiber_main);
    f.sp = sp;
  }
  std::vector<int> warps(count / 32);
  std::iota(warps.begin(), warps.end(), 0);
  int done = 0;
  for (int pass = 0; done < count; pass++) {
    std::shuffle(warps.begin(), warps.end(), m->random);
    bool progress = false;
    for (int w : warps) {
      if (m->random() % 4 == 0) continue;  // some warps fall behind
      if (pass < m->ctas[m->fibers[w * 32].cta].start) continue;
      for (int lane = 0; lane < 32; lane++) {
        Fiber& f = m->fibers[w * 32 + lane];
        if (f.done || (f.wait_on && *f.wait_on == f.wait_value)) continue;
        f.wait_on = nullptr;
        m->now = &f;
        emu_switch(&m->scheduler_sp, f.sp);
        if (!m->error.empty()) return;
        progress = true;
        done += f.done;
      }
    }
    bool landed = deliver(false);
    if (progress || landed) continue;
    bool runnable = std::any_of(m->fibers.begin(), m->fibers.end(), [](const Fiber& f) {
      return !f.done && !(f.wait_on && *f.wait_on == f.wait_value);
    });
    if (runnable || deliver(true)) continue;
    for (Fiber& f : m->fibers)
      if (!f.done) {
        m->error = "deadlock: CTA " + std::to_string(f.cta) + " thread " + std::to_string(f.tid) +
                   " waits for ever, line " + std::to_string(f.site);
        return;
      }
  }
  if (!m->in_flight.empty()) m->error = "stores in flight to a CTA that has exited";
}

}  // namespace emu

// params[0] is the size of shared memory; the kernel's own follow. Ranges are triples: begin, end, writable.
extern "C" int emulate(int grid, int cluster, int threads, const uint64_t* params, const uint64_t* ranges,
                       int num_ranges, unsigned seed, char* error, int error_bytes) {
  emu::Machine machine;
  emu::m = &machine;
  machine.cluster = cluster;
  machine.threads = threads;
  machine.params = params;
  machine.random.seed(seed);
  for (int i = 0; i < num_ranges; i++)
    machine.ranges.push_back({ranges[3 * i], ranges[3 * i + 1], ranges[3 * i + 2] != 0});
  std::vector<char> stacks(size_t(cluster) * threads * emu::STACK_BYTES);
  for (int block = 0; block < grid && machine.error.empty(); block += cluster) {
    machine.first_block = block;
    emu::run_cluster(stacks);
  }
  snprintf(error, error_bytes, "%s", machine.error.c_str());
  return machine.error.empty() ? 0 : 1;
}
