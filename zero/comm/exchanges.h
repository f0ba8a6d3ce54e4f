// Values of any number as exchanges of a transport, which takes chunks of limited size.
#pragma once

#include <algorithm>
#include <vector>

#include "zero/comm/transport.h"

namespace ballast {

// The values that a rank sends in a collective of any number of exchanges: `values` to each rank; those for rank p
// begin p * stride bytes later.
struct Sent {
  Call call{};
  ConstView values{};
  std::size_t stride = 0;
  std::size_t sender = all_ranks;
  ChunkMemory where = ChunkMemory::backend;
  std::size_t block_bytes = 1;      // chunks and pieces begin at multiples of this
  const NextChunk* next = nullptr;  // what comes after these values

  // The chunk of one exchange, which is a part of the values.
  SentChunk chunk(const ConstView& part) const {
    return {.call = call,
            .data = part.data(),
            .bytes = part.bytes(),
            .stride = stride,
            .sender = sender,
            .where = where,
            .block_bytes = block_bytes,
            .next = part.data() + part.bytes() == values.data() + values.bytes() ? next : nullptr};
  }
};

// Sends in chunks; at least one, because peers expect it. Calls body(part, first); the part begins at the element `first`.
template <class Body>
void each_chunk(Transport& transport, const Sent& sent, Body&& body) {
  const ConstView& values = sent.values;
  const SentChunk whole = sent.chunk(values);
  const std::size_t most =
      whole.piece_bytes(transport.max_chunk_bytes(sent.where, whole.all(transport.size()))) / byte_size(values.dtype());
  std::size_t first = 0;
  do {
    const ConstView mine = values.part(first, std::min(most, values.count() - first));
    if (sent.sender == all_ranks || sent.sender == transport.rank()) transport.count_sent(mine.bytes());
    body(mine, first);
    first += mine.count();
  } while (first < values.count());
}

// Calls take(peer, piece, first); the piece begins at the element `first` of what the peer sends.
template <class TakePiece>
void exchange(Transport& transport, const Sent& sent, TakePiece&& take) {
  const std::size_t width = byte_size(sent.values.dtype());
  each_chunk(transport, sent, [&](const ConstView& mine, std::size_t first) {
    transport.exchange(sent.chunk(mine), [&](std::size_t peer, std::span<const std::byte> theirs, std::size_t at) {
      take(peer, ConstView(theirs.data(), theirs.size() / width, mine.dtype()), first + at / width);
    });
  });
}

// Calls take(by_rank, first) with as many values of each rank, which begin at the element `first` of what it sends. Before this
// rank's own values are sent, make(first, count) is called for them, in order.
template <class Make, class TakeTogether>
void exchange_together(Transport& transport, const Sent& sent, Make&& make, TakeTogether&& take) {
  const std::size_t width = byte_size(sent.values.dtype());
  std::vector<ConstView> by_rank(transport.size());
  each_chunk(transport, sent, [&](const ConstView& mine, std::size_t begin) {
    const Prepare prepare = [&](std::size_t first, std::size_t bytes) { make(begin + first / width, bytes / width); };
    SentChunk chunk = sent.chunk(mine);
    chunk.prepare = &prepare;
    transport.exchange_together(chunk,
                                [&](std::span<const std::byte* const> theirs, std::size_t bytes, std::size_t first) {
                                  std::ranges::transform(theirs, by_rank.begin(), [&](const std::byte* values) {
                                    return ConstView(values, bytes / width, mine.dtype());
                                  });
                                  take(std::span<const ConstView>(by_rank), begin + first / width);
                                });
  });
}

template <class TakeTogether>
void exchange_together(Transport& transport, const Sent& sent, TakeTogether&& take) {
  exchange_together(
      transport, sent, [](std::size_t, std::size_t) {}, take);
}

}  // namespace ballast
