#include "direct_exchange.h"
#include "direct_inbox.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include "gloo/allgather.h"

namespace horovod {
namespace common {

namespace {

// A buffer is small if a host sends no more bytes than these, all its messages together.
constexpr size_t kSmallTraffic = 32 * 1024;
constexpr size_t kSmallestSlot = 256;
// Bytes of a block of an all-reduce at most, unless its pieces were smaller than kLeastPiece then,
// and of a piece.
constexpr size_t kMostBlock = 4 * 1024 * 1024;
constexpr size_t kMostPiece = 1024 * 1024;
// A message has room without being announced if it is a rank's part of as many bytes as the largest
// block has, and of the scales that codecs send with them.
constexpr double kWithScales = 33.0 / 32;

// Where each rank's part begins, if the parts follow each other; and at last their end.
std::vector<size_t> Offsets(const std::vector<size_t>& bytes) {
  std::vector<size_t> offsets(bytes.size() + 1, 0);
  std::partial_sum(bytes.begin(), bytes.end(), offsets.begin() + 1);
  return offsets;
}

std::vector<size_t> Bytes(const std::vector<int32_t>& counts, size_t row_bytes) {
  std::vector<size_t> bytes;
  for (int32_t count : counts) {
    bytes.push_back(count * row_bytes);
  }
  return bytes;
}

} // namespace

DirectExchange::DirectExchange(std::shared_ptr<gloo::Context> context,
                               const std::shared_ptr<gloo::Context>& local)
    : context_(std::move(context)), ring_(std::getenv("HOROVOD_GLOO_RING") != nullptr),
      host_of_(context_->size), place_of_(context_->size), inboxes_(context_->size) {
  int rank = context_->rank;
  const int size = context_->size;
  // A host's name is its first rank.
  std::vector<int> ranks(local->size), first(size);
  gloo::AllgatherOptions of_host(local);
  of_host.setInput(&rank, 1);
  of_host.setOutput(ranks.data(), ranks.size());
  gloo::allgather(of_host);
  int own_first = *std::min_element(ranks.begin(), ranks.end());
  gloo::AllgatherOptions of_all(context_);
  of_all.setInput(&own_first, 1);
  of_all.setOutput(first.data(), first.size());
  gloo::allgather(of_all);

  std::map<int, std::vector<int>> by_first;
  for (int peer = 0; peer < size; peer++) {
    by_first[first[peer]].push_back(peer);
  }
  size_t most = 0;
  adders_ = size;
  for (const auto& named : by_first) {
    const std::vector<int>& host = named.second;
    for (size_t place = 0; place < host.size(); place++) {
      host_of_[host[place]] = hosts_.size();
      place_of_[host[place]] = place;
    }
    hosts_.push_back(host);
    adders_ = std::min(adders_, host.size());
    most = std::max(most, host.size());
  }
  host_ = host_of_[rank];
  place_ = place_of_[rank];

  const size_t pieces = adders_ * hosts_.size();
  piece_bytes_ = std::min(std::max(kMostBlock / pieces / 64 * 64, kLeastPiece), kMostPiece);
  slot_bytes_ = std::max<size_t>(piece_bytes_, kWithScales * kMostBlock / pieces);
  small_bytes_ = std::max(kSmallTraffic / (size * most) / 64 * 64, kSmallestSlot);
  if (size == 2 && hosts_.size() == 2) {
    // Two ranks send as many bytes if each sends all of its values, and half as many messages.
    small_bytes_ = piece_bytes_;
  }
  for (int peer : Peers()) {
    inboxes_[peer].reset(new Inbox(*context_, peer, SlotBytes(peer, rank)));
    inboxes_[peer]->Announce();
  }
}

DirectExchange::~DirectExchange() = default;

bool DirectExchange::AllGather(void* parts, const std::vector<size_t>& bytes) {
  const int rank = context_->rank;
  const bool hosts_are_ranks = hosts_.size() == bytes.size();
  if (ring_ || bytes.size() == 1 ||
      !(hosts_are_ranks || *std::max_element(bytes.begin(), bytes.end()) <= small_bytes_)) {
    return false;
  }
  const std::vector<size_t> offsets = Offsets(bytes);
  if (offsets.back() == 0) {
    return true;
  }
  const auto buffer = context_->createUnboundBuffer(parts, offsets.back());
  const auto has_room = [&](int from, int to) { return bytes[from] <= SlotBytes(from, to); };
  // Announcements before all parts, so that they are read before them.
  for (int peer : Peers()) {
    inboxes_[peer]->Announce();
    if (!has_room(peer, rank)) {
      buffer->recv(peer, kResults, offsets[peer], bytes[peer]);
    }
  }
  for (int peer : Peers()) {
    if (bytes[rank] > 0) {
      buffer->send(peer, has_room(rank, peer) ? kValues : kResults, offsets[rank], bytes[rank]);
    }
  }
  for (int peer : Peers()) {
    if (!has_room(peer, rank)) {
      buffer->waitRecv(context_->getTimeout());
    } else if (bytes[peer] > 0) {
      std::memcpy(static_cast<uint8_t*>(parts) + offsets[peer], inboxes_[peer]->Take(),
                  bytes[peer]);
    }
  }
  for (size_t sent = 0; bytes[rank] > 0 && sent + 1 < bytes.size(); sent++) {
    buffer->waitSend(context_->getTimeout());
  }
  return true;
}

void DirectExchange::OfferRows(const void* rows, size_t row_bytes) {
  rows_.offered = rows;
  rows_.row_bytes = row_bytes;
}

bool DirectExchange::SendRows(const std::vector<int32_t>& counts, std::vector<int32_t>& received) {
  if (ring_ || counts.size() == 1) {
    return false;
  }
  const int rank = context_->rank;
  rows_.sent = counts;
  rows_.counts = context_->createUnboundBuffer(rows_.sent.data(), counts.size() * sizeof(int32_t));
  const std::vector<size_t> bytes = Bytes(counts, rows_.offered ? rows_.row_bytes : 0);
  const std::vector<size_t> offsets = Offsets(bytes);
  rows_.outgoing =
      context_->createUnboundBuffer(const_cast<void*>(rows_.offered), offsets.back());
  for (int peer : Peers()) {
    inboxes_[peer]->Announce();
  }
  for (int peer : Peers()) {
    rows_.counts->send(peer, kValues, peer * sizeof(int32_t), sizeof(int32_t));
    if (bytes[peer] > 0 && bytes[peer] <= SlotBytes(rank, peer)) {
      rows_.outgoing->send(peer, kValues, offsets[peer], bytes[peer]);
    }
  }
  received = counts;
  for (int peer : Peers()) {
    std::memcpy(&received[peer], inboxes_[peer]->Take(), sizeof(int32_t));
  }
  rows_.received = received;
  for (size_t sent = 0; sent + 1 < counts.size(); sent++) {
    rows_.counts->waitSend(context_->getTimeout());
  }
  return true;
}

bool DirectExchange::ReceiveRows(void* rows) {
  if (ring_ || rows_.received.size() <= 1) {
    return false;
  }
  const int rank = context_->rank;
  const std::vector<size_t> bytes = Bytes(rows_.received, rows_.row_bytes);
  const std::vector<size_t> own = Bytes(rows_.sent, rows_.row_bytes);
  const std::vector<size_t> offsets = Offsets(bytes);
  const std::vector<size_t> own_offsets = Offsets(own);
  const auto incoming = context_->createUnboundBuffer(rows, offsets.back());
  const auto has_room = [&](int peer) { return bytes[peer] <= SlotBytes(peer, rank); };
  const auto at = [&](int peer) { return static_cast<uint8_t*>(rows) + offsets[peer]; };
  for (int peer : Peers()) {
    if (!has_room(peer)) {
      incoming->recv(peer, kResults, offsets[peer], bytes[peer]);
    }
  }
  // Large rows leave after this rank has said that it can receive: that word goes through the same
  // stream, and behind the rows it would let the two directions take turns.
  for (int peer : Peers()) {
    if (own[peer] > SlotBytes(rank, peer)) {
      rows_.outgoing->send(peer, kResults, own_offsets[peer], own[peer]);
    }
  }
  std::memcpy(at(rank), static_cast<const uint8_t*>(rows_.offered) + own_offsets[rank], own[rank]);
  for (int peer : Peers()) {
    if (has_room(peer) && bytes[peer] > 0) {
      std::memcpy(at(peer), inboxes_[peer]->Take(), bytes[peer]);
    }
  }
  for (int peer : Peers()) {
    if (!has_room(peer)) {
      incoming->waitRecv(context_->getTimeout());
    }
  }
  for (int peer : Peers()) {
    if (own[peer] > 0) {
      rows_.outgoing->waitSend(context_->getTimeout());
    }
  }
  rows_ = Rows();
  return true;
}

size_t DirectExchange::SlotBytes(int from, int to) const {
  size_t bytes = 0;
  if (place_of_[to] < adders_ && host_of_[from] == host_of_[to]) {
    bytes = hosts_.size() * slot_bytes_;
  } else if (place_of_[to] < adders_ && place_of_[from] == place_of_[to]) {
    bytes = slot_bytes_;
  }
  return std::max(bytes, small_bytes_);
}

std::vector<int> DirectExchange::Peers() const {
  std::vector<int> peers;
  for (int i = 1; i < context_->size; i++) {
    peers.push_back((context_->rank + i) % context_->size);
  }
  return peers;
}

} // namespace common
} // namespace horovod
