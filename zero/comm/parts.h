// The parts of an exchange as transports match them: the n-th that a rank sends to another with the n-th that this receives.
#pragma once

#include <ballast/error.h>

#include <fmt/format.h>

#include <vector>

#include "zero/comm/transport.h"

namespace ballast {

// The parts that go to one rank, or come from it, in order.
template <class Part>
auto parts_of(std::span<const Part> parts, std::size_t peer) {
  std::vector<decltype(Part::values)> found;
  for (const Part& part : parts) {
    if (part.rank == peer && part.values.bytes() > 0) found.push_back(part.values);
  }
  return found;
}

template <class Views>
std::size_t bytes_in(const Views& views) {
  std::size_t bytes = 0;
  for (const auto& view : views)
    bytes += view.bytes();
  return bytes;
}

// The sizes of the parts that pass from one rank to another, as both can compare them.
struct PartSizes {
  std::uint64_t bytes = 0;     // bytes of all parts
  std::uint64_t checksum = 0;  // differs if the size of one of them does
};

template <class Views>
PartSizes sizes_of(const Views& views) {
  constexpr std::uint64_t basis = 14695981039346656037U, prime = 1099511628211;  // the constants of the FNV hash
  PartSizes sizes{.bytes = bytes_in(views), .checksum = basis};
  for (const auto& view : views)
    sizes.checksum = (sizes.checksum ^ view.bytes()) * prime;
  return sizes;
}

// `peer` is the sender's rank in the job.
inline void require_same_parts(const PartSizes& received, const PartSizes& sent, std::size_t peer) {
  require(received.bytes == sent.bytes && received.checksum == sent.checksum, Code::wrong_size, [&] {
    return Problem{.what = fmt::format("rank {} sends parts of other sizes than this rank receives", peer),
                   .needed = fmt::format("{} bytes in all", received.bytes),
                   .available = fmt::format("{} bytes in all", sent.bytes),
                   .remedy = "Exchange the same parts on both ranks, in the same order."};
  });
}

// Calls body(data, bytes) for pieces of at most so many bytes, each of one view.
template <class Views, class Body>
void each_piece(const Views& views, std::size_t most, Body&& body) {
  for (const auto& view : views) {
    for (std::size_t first = 0; first < view.bytes(); first += most) {
      body(view.data() + first, std::min(most, view.bytes() - first));
    }
  }
}

// Calls body(data, bytes) for the pieces of views that have the bytes from `first` on, of all their bytes one after the other.
template <class Views, class Body>
void each_stretch(const Views& views, std::size_t first, std::size_t bytes, Body&& body) {
  for (const auto& view : views) {
    if (bytes == 0) return;
    if (first >= view.bytes()) {
      first -= view.bytes();
      continue;
    }
    const std::size_t count = std::min(bytes, view.bytes() - first);
    body(view.data() + first, count);
    bytes -= count;
    first = 0;
  }
}

}  // namespace ballast
