// Exchanges of a process set over gloo's connections, in place of gloo's own.
//
// All-reduce, in direct_allreduce.cc:
//
// - One order of additions: a host's ranks in their order, then hosts in theirs. In a ring it depends
//   on an element's place in the buffer, and so on which tensors Horovod happened to fuse.
// - Few messages one after the other: one if the buffer is small, otherwise two, plus two within a
//   host that has several ranks, if there are several hosts. In a ring of N ranks it is 2 (N - 1).
// - Of a small buffer, only the first rank of each host sends to other hosts.
// - No more bytes between hosts than in a ring: several ranks of a host first add up among themselves.
//
// All-gather and all-to-all, in direct_exchange.cc: one message to each rank, which it does not have
// to ask for if its part is not too large. gloo's all-gather has 2 (N - 1) messages one after the
// other, and its all-to-all four: ranks first tell each other how much they will send.
//
// With HOROVOD_GLOO_RING in the environment of all ranks these are gloo's own, to compare with.

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

// All methods but OfferRows are collective. They throw gloo::IoException if a rank is lost; the
// object cannot be used again then.
class DirectExchange {
public:
  using Reduce = gloo::AllreduceOptions::Func;

  // Collective: all ranks of `context` must construct it. `local` has those of this host.
  DirectExchange(std::shared_ptr<gloo::Context> context,
                 const std::shared_ptr<gloo::Context>& local);
  ~DirectExchange();

  // Replaces `count` elements by their reduction over all ranks.
  void AllReduce(void* elements, size_t count, size_t element_bytes, const Reduce& reduce);

  // Gathers the ranks' parts, which follow each other in `parts`; this rank's is already there.
  // `bytes` has each rank's. Returns false if nothing was done, because gloo's all-gather serves
  // better: it sends a part that is not small only once to a host with several ranks.
  bool AllGather(void* parts, const std::vector<size_t>& bytes);

  // An all-to-all is three calls, because a rank allocates its output between the last two:
  // OfferRows says which rows follow each other in memory for the ranks; SendRows sends to each rank
  // that number of them, and returns how many arrive; ReceiveRows receives them, one rank's after
  // another's. Without rows on offer, only the numbers are exchanged. SendRows and ReceiveRows
  // return false if nothing was done, and gloo's all-to-all must be used.
  void OfferRows(const void* rows, size_t row_bytes);
  bool SendRows(const std::vector<int32_t>& counts, std::vector<int32_t>& received);
  bool ReceiveRows(void* rows);

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

  // An all-to-all between its first and its last call.
  struct Rows {
    const void* offered = nullptr;
    size_t row_bytes = 0;
    std::vector<int32_t> sent;
    std::vector<int32_t> received;
    std::unique_ptr<gloo::transport::UnboundBuffer> counts;
    std::unique_ptr<gloo::transport::UnboundBuffer> outgoing;
  };

  // The largest message that `to` has room for before `from` has announced it.
  size_t SlotBytes(int from, int to) const;

  // The other ranks, beginning with the next one.
  std::vector<int> Peers() const;

  std::shared_ptr<gloo::Context> context_;
  const bool ring_;
  // Ranks of each host, where each rank is among them, and where this one is.
  std::vector<std::vector<int>> hosts_;
  std::vector<size_t> host_of_;
  std::vector<size_t> place_of_;
  size_t host_ = 0;
  size_t place_ = 0;
  // Ranks of each host that add up what the others send: as many as the smallest host has.
  size_t adders_ = 0;
  // Largest buffer that each rank sends to all, and largest one that two hosts exchange otherwise.
  size_t small_bytes_ = 0;
  size_t piece_bytes_ = 0;
  // What two ranks have room for, that exchange pieces.
  size_t slot_bytes_ = 0;
  // By rank; none for this one.
  std::vector<std::unique_ptr<Inbox>> inboxes_;
  Rows rows_;
};

} // namespace common
} // namespace horovod
