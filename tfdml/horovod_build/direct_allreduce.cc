#include "direct_exchange.h"
#include "direct_inbox.h"

#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>

#include "gloo/common/error.h"

namespace horovod {
namespace common {

namespace {

// Blocks that a rank sends before it waits for the first one from others, so that a block is on the
// way while another one is added.
constexpr size_t kAhead = 2;

template <typename T>
void InRing(const std::shared_ptr<gloo::Context>& context, void* elements, size_t count,
            const DirectExchange::Reduce& reduce) {
  gloo::AllreduceOptions options(context);
  options.setOutput(static_cast<T*>(elements), count);
  options.setReduceFunction(reduce);
  gloo::allreduce(options);
}

// gloo needs to know only how large an element is.
void InRing(const std::shared_ptr<gloo::Context>& context, void* elements, size_t count,
            size_t element_bytes, const DirectExchange::Reduce& reduce) {
  if (element_bytes == 1) {
    InRing<uint8_t>(context, elements, count, reduce);
  } else if (element_bytes == 2) {
    InRing<uint16_t>(context, elements, count, reduce);
  } else if (element_bytes == 4) {
    InRing<uint32_t>(context, elements, count, reduce);
  } else {
    InRing<uint64_t>(context, elements, count, reduce);
  }
}

} // namespace

// One call of AllReduce.
class DirectExchange::Operation {
public:
  Operation(DirectExchange& all, void* elements, size_t count, size_t element_bytes,
            const Reduce& reduce)
      : all_(all), bytes_(static_cast<uint8_t*>(elements)), count_(count),
        element_bytes_(element_bytes), reduce_(reduce), timeout_(all.context_->getTimeout()),
        outgoing_(NewBuffer()), incoming_(all.context_->size) {}

  // Each rank sends its elements to all others and adds all of them.
  void ToAll() {
    const int rank = all_.context_->rank, size = all_.context_->size;
    for (int i = 1; i < size; i++) {
      const int peer = (rank + i) % size;
      all_.inboxes_[peer]->Announce(); // Before the values, so that it is read before them.
      Send(peer, kValues, {0, count_});
    }
    std::vector<int> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    const std::vector<uint8_t*> values = Taken(ranks, {0, count_});
    WaitSent(); // Adding changes the elements that were sent.
    Add(values, bytes_, count_);
  }

  // The first rank of each host adds its host's elements, exchanges them with those of other hosts,
  // and sends its host the total. Three messages one after the other, of which one leaves a host for
  // each other host; to all, it would be one for each pair of ranks on different hosts.
  void ThroughFirstRanks() {
    const int first = own_host()[0];
    if (all_.context_->rank != first) {
      all_.inboxes_[first]->Announce();
      Send(first, kValues, {0, count_});
      const uint8_t* total = all_.inboxes_[first]->Take();
      WaitSent();
      std::memcpy(bytes_, total, count_ * element_bytes_);
      return;
    }
    std::vector<int> firsts;
    for (const auto& host : all_.hosts_) {
      firsts.push_back(host[0]);
    }
    Add(Taken(own_host(), {0, count_}), bytes_, count_);
    for (int peer : firsts) {
      if (peer != first) {
        all_.inboxes_[peer]->Announce();
        Send(peer, kValues, {0, count_});
      }
    }
    const std::vector<uint8_t*> sums = Taken(firsts, {0, count_});
    WaitSent();
    Add(sums, bytes_, count_);
    for (size_t place = 1; place < own_host().size(); place++) {
      all_.inboxes_[own_host()[place]]->Announce();
      Send(own_host()[place], kValues, {0, count_});
    }
    WaitSent();
  }

  // Cuts the elements into blocks, and each block into one part for each adder of a host, and each
  // part into one piece for each host. The steps of a block follow those of the block before.
  void InBlocks() {
    const size_t bytes = count_ * element_bytes_;
    const size_t pieces = all_.adders_ * all_.hosts_.size();
    const size_t block_bytes = pieces * all_.piece_bytes_;
    // At least two, if they are not too small, so that one is added while the other is on the way.
    const size_t blocks = std::max<size_t>((bytes + block_bytes - 1) / block_bytes,
                                           bytes >= 2 * pieces * kLeastPiece ? 2 : 1);
    const bool adds = all_.place_ < all_.adders_;
    for (int peer : own_host()) {
      Open(peer, adds ? blocks : 0);
    }
    for (size_t host = 0; adds && host < all_.hosts_.size(); host++) {
      Open(all_.hosts_[host][all_.place_], blocks);
    }
    const size_t within = own_host().size() > 1 ? kAhead : 0;
    const size_t between = all_.hosts_.size() > 1 ? kAhead : 0;
    const size_t last = within + 2 * between;
    for (size_t step = 0; step < blocks + last; step++) {
      // Blocks begin one after the other; in each of the later steps some have not arrived there yet.
      const auto block_at = [&](size_t delay, Range& block) {
        const bool exists = step >= delay && step - delay < blocks;
        if (exists) {
          block = Range{0, count_}.Part(step - delay, blocks);
        }
        return exists;
      };
      Range block;
      if (block_at(0, block)) {
        SendToOwnHost(block);
      }
      if (adds && block_at(within, block)) {
        AddOwnHost(OwnPart(block));
      }
      if (adds && block_at(within + between, block)) {
        AddHosts(OwnPart(block));
      }
      if (adds && block_at(last, block)) {
        Share(OwnPart(block));
      }
    }
    for (size_t place = 0; place < all_.adders_; place++) {
      for (size_t block = 0; place != all_.place_ && block < blocks; block++) {
        WaitForResult(own_host()[place]);
      }
    }
    WaitSent();
  }

private:
  const std::vector<int>& own_host() const { return all_.hosts_[all_.host_]; }

  Range OwnPart(Range block) const { return block.Part(all_.place_, all_.adders_); }

  void SendToOwnHost(Range block) {
    const size_t ranks = own_host().size();
    for (size_t i = 1; i < ranks; i++) {
      const size_t place = (all_.place_ + i) % ranks;
      if (place < all_.adders_) {
        const Range part = block.Part(place, all_.adders_);
        Send(own_host()[place], kValues, part);
        ReceiveResult(own_host()[place], part);
      }
    }
  }

  // Adds this host's values of a part, and sends other hosts their pieces of the sum.
  void AddOwnHost(Range part) {
    AddAll(own_host(), part);
    const size_t hosts = all_.hosts_.size();
    for (size_t i = 1; i < hosts; i++) {
      const size_t host = (all_.host_ + i) % hosts;
      const Range piece = part.Part(host, hosts);
      Send(all_.hosts_[host][all_.place_], kValues, piece);
      ReceiveResult(all_.hosts_[host][all_.place_], piece);
    }
  }

  // Adds the hosts' sums of this host's piece, and sends other hosts the total.
  void AddHosts(Range part) {
    const size_t hosts = all_.hosts_.size();
    const Range piece = part.Part(all_.host_, hosts);
    std::vector<int> peers;
    for (const auto& host : all_.hosts_) {
      peers.push_back(host[all_.place_]);
    }
    AddAll(peers, piece);
    for (size_t i = 1; i < hosts; i++) {
      Send(peers[(all_.host_ + i) % hosts], kResults, piece);
    }
  }

  // Sends this host's other ranks the total, once the other hosts' pieces have arrived.
  void Share(Range part) {
    const size_t ranks = own_host().size();
    for (size_t host = 0; host < all_.hosts_.size(); host++) {
      if (host != all_.host_) {
        WaitForResult(all_.hosts_[host][all_.place_]);
      }
    }
    for (size_t i = 1; i < ranks; i++) {
      Send(own_host()[(all_.place_ + i) % ranks], kResults, part);
    }
  }

  // Returns what some ranks have sent, in their order, with this rank's own elements in its place.
  std::vector<uint8_t*> Taken(const std::vector<int>& ranks, Range range) {
    std::vector<uint8_t*> values;
    for (int peer : ranks) {
      values.push_back(peer == all_.context_->rank ? At(range) : all_.inboxes_[peer]->Take());
    }
    return values;
  }

  // Adds what some ranks have sent to this rank's own elements, in the order of the ranks.
  void AddAll(const std::vector<int>& ranks, Range range) {
    Add(Taken(ranks, range), At(range), range.size());
    for (int peer : ranks) {
      if (peer != all_.context_->rank) {
        all_.inboxes_[peer]->Release();
      }
    }
  }

  // Writes ((v0 + v1) + v2) + ... to `sum`, which may be one of the values. The first is overwritten.
  void Add(const std::vector<uint8_t*>& values, uint8_t* sum, size_t count) {
    for (size_t i = 1; i < values.size(); i++) {
      const bool last = i + 1 == values.size();
      reduce_(last ? sum : values[0], values[0], values[i], count);
    }
    if (values.size() == 1 && values[0] != sum) {
      std::memcpy(sum, values[0], count * element_bytes_);
    }
  }

  uint8_t* At(Range range) const { return bytes_ + range.begin * element_bytes_; }

  std::unique_ptr<gloo::transport::UnboundBuffer> NewBuffer() {
    return all_.context_->createUnboundBuffer(bytes_, count_ * element_bytes_);
  }

  // Prepares for a peer that will send that many messages with values, and results.
  void Open(int peer, size_t messages) {
    if (peer != all_.context_->rank) {
      all_.inboxes_[peer]->Expect(messages);
      incoming_[peer] = NewBuffer();
    }
  }

  void Send(int peer, uint64_t slot, Range range) {
    outgoing_->send(peer, slot, range.begin * element_bytes_, range.size() * element_bytes_);
    sends_++;
  }

  void ReceiveResult(int peer, Range range) {
    incoming_[peer]->recv(peer, kResults, range.begin * element_bytes_,
                          range.size() * element_bytes_);
  }

  void WaitForResult(int peer) { incoming_[peer]->waitRecv(timeout_); }

  void WaitSent() {
    for (; sends_ > 0; sends_--) {
      outgoing_->waitSend(timeout_);
    }
  }

  DirectExchange& all_;
  uint8_t* const bytes_;
  const size_t count_;
  const size_t element_bytes_;
  const Reduce& reduce_;
  const std::chrono::milliseconds timeout_;
  // The elements as what is sent, and as what each peer's results replace: a buffer counts arrivals,
  // but does not tell whose they were.
  std::unique_ptr<gloo::transport::UnboundBuffer> outgoing_;
  std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> incoming_;
  size_t sends_ = 0;
};

void DirectExchange::AllReduce(void* elements, size_t count, size_t element_bytes,
                          const Reduce& reduce) {
  if (context_->size == 1 || count == 0) {
    return;
  }
  if (ring_) {
    InRing(context_, elements, count, element_bytes, reduce);
    return;
  }
  Operation operation(*this, elements, count, element_bytes, reduce);
  if (count * element_bytes <= small_bytes_) {
    const size_t ranks = inboxes_.size();
    if (hosts_.size() > 1 && hosts_.size() < ranks) {
      operation.ThroughFirstRanks();
    } else {
      operation.ToAll();
    }
    return;
  }
  operation.InBlocks();
  try {
    for (auto& inbox : inboxes_) {
      if (inbox) {
        inbox->Announce();
      }
    }
  } catch (const gloo::IoException&) {
    // A rank has left after this operation. If there is another one, that will throw.
  }
}

} // namespace common
} // namespace horovod
