// All-reduce of a process set over gloo's connections, in place of gloo's ring.
//
// - One order of additions: a host's ranks in their order, then hosts in theirs. In a ring it depends
//   on an element's place in the buffer, and so on which tensors Horovod happened to fuse.
// - Few messages one after the other: one if the buffer is small, otherwise two, plus two within a
//   host that has several ranks. In a ring of N ranks it is 2 (N - 1).
// - No more bytes between hosts than in a ring: several ranks of a host first add up among themselves.
//
// With HOROVOD_GLOO_RING in the environment of all ranks it is gloo's ring, to compare with.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gloo/allreduce.h"
#include "gloo/context.h"
#include "gloo/transport/unbound_buffer.h"

namespace horovod {
namespace common {

class DirectAllreduce {
public:
  using Reduce = gloo::AllreduceOptions::Func;

  // Collective: all ranks of `context` must construct it. `local` has those of this host.
  DirectAllreduce(std::shared_ptr<gloo::Context> context,
                  const std::shared_ptr<gloo::Context>& local);
  ~DirectAllreduce();

  // Replaces `count` elements by their reduction over all ranks. Throws gloo::IoException if a rank
  // is lost; the object cannot be used again then.
  void Run(void* elements, size_t count, size_t element_bytes, const Reduce& reduce);

private:
  // Elements from `begin` up to `end`.
  struct Range {
    size_t begin;
    size_t end;
    size_t size() const { return end - begin; }
    // The `index`-th of `parts` ranges of equal size that make up this one.
    Range Part(size_t index, size_t parts) const {
      return {begin + size() * index / parts, begin + size() * (index + 1) / parts};
    }
  };

  class Inbox;
  class Operation;

  std::shared_ptr<gloo::Context> context_;
  const bool ring_;
  // Ranks of each host, and where this rank is among them.
  std::vector<std::vector<int>> hosts_;
  size_t host_ = 0;
  size_t place_ = 0;
  // Ranks of each host that add up what the others send: as many as the smallest host has.
  size_t adders_ = 0;
  // Largest buffer that each rank sends to all, and largest one that two hosts exchange otherwise.
  size_t small_bytes_ = 0;
  size_t piece_bytes_ = 0;
  // By rank; none for this one.
  std::vector<std::unique_ptr<Inbox>> inboxes_;
};

} // namespace common
} // namespace horovod
