#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "direct_exchange.h"
#include "gloo/types.h"

namespace horovod {
namespace common {

// gloo keeps the order of messages between two ranks with one of these numbers. Its own all-reduce
// has number 0.
const uint64_t kValues = gloo::Slot::build(gloo::kAllreduceSlotPrefix, 1);
const uint64_t kResults = gloo::Slot::build(gloo::kAllreduceSlotPrefix, 2);

// Messages that a rank may send before the receiver has taken the first one.
constexpr size_t kSlots = 4;
// An all-reduce is cut into pieces of at least as many bytes, if it can be.
constexpr size_t kLeastPiece = 64 * 1024;

// What one peer sends here. gloo sends a message only after the receiver has announced
// a buffer for it. Here that happened in an earlier operation, so nothing waits for it.
//
// When a rank shuts down after the last operation, its connections must not hold announcements that
// it has not read: closing would destroy what it has sent. And each message has a gloo buffer of its
// own: if a peer closes a connection, gloo fails all buffers that still wait for it.
class DirectExchange::Inbox {
public:
  Inbox(gloo::Context& context, int rank, size_t slot_bytes)
      : rank_(rank), timeout_(context.getTimeout()),
        memory_(new uint8_t[kSlots * slot_bytes]) {
    for (size_t slot = 0; slot < kSlots; slot++) {
      buffers_.push_back(
          context.createUnboundBuffer(memory_.get() + slot * slot_bytes, slot_bytes));
    }
  }

  // Announces buffers for the next kSlots messages.
  void Announce() { AnnounceUpTo(taken_ + kSlots); }

  // Says how many messages the operation that begins now will take.
  void Expect(size_t messages) {
    expected_ = taken_ + messages;
    Release();
  }

  // Returns the next message, which is valid until it is released.
  uint8_t* Take() {
    auto& buffer = buffers_[taken_++ % kSlots];
    buffer->waitRecv(timeout_);
    return static_cast<uint8_t*>(buffer->ptr);
  }

  // Announces the message's memory again if this operation needs it.
  void Release() { AnnounceUpTo(std::min(expected_, taken_ + kSlots)); }

private:
  void AnnounceUpTo(size_t messages) {
    for (; announced_ < messages; announced_++) {
      buffers_[announced_ % kSlots]->recv(rank_, kValues);
    }
  }

  const int rank_;
  const std::chrono::milliseconds timeout_;
  std::unique_ptr<uint8_t[]> memory_;
  std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> buffers_;
  size_t announced_ = 0;
  size_t taken_ = 0;
  size_t expected_ = 0;
};

} // namespace common
} // namespace horovod
