#include "zero/comm/encoded.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "kernels/random_math.h"
#include "kernels/reduction_memory.h"
#include "zero/comm/exchanges.h"

namespace ballast {

using kernels::block_bytes;
using kernels::CodeBits;
using kernels::encoded_part_bytes;
using kernels::exchanged_block_bytes;
using kernels::quantized_bytes;

namespace {

std::size_t elements_of(std::size_t bytes, CodeBits bits) { return bytes / block_bytes(bits) * group_size; }
std::size_t bytes_before(std::size_t element, CodeBits bits) { return element / group_size * block_bytes(bits); }

// The last block of what arrives may have elements that the part lacks.
std::vector<ConstView> beginnings(std::span<const ConstView> arrays, std::size_t bytes) {
  std::vector<ConstView> parts;
  std::ranges::transform(arrays, std::back_inserter(parts), [&](const ConstView& each) { return each.part(0, bytes); });
  return parts;
}

}  // namespace

EncodedCollective::Stretch EncodedCollective::Parts::clip(std::size_t rank, const Stretch& stretch) const {
  const std::size_t there = std::min(part, count - begin(rank));
  const std::size_t first = std::min(stretch.first, there);
  return {first, std::min(stretch.count, there - first)};
}

void EncodedCollective::all_gather(const ConstView& mine, const View& all) {
  const CodeBits bits = encoding_.values;
  require_memory(kernels::encoded_parts_bytes(mine.count(), group_.size(), bits));
  const std::size_t at = group_.rank() * encoded_part_bytes(mine.count(), bits);
  backend_.quantize(mine, {bits, memory(at, quantized_bytes(mine.count(), bits))}, {});
  hand_out({all.count(), mine.count()}, bits, all);
}

void EncodedCollective::reduce_scatter(const ConstView& all, const View& into) {
  require_memory(kernels::encoded_parts_bytes(into.count(), group_.size(), encoding_.values));
  add_parts(all, {all.count(), into.count()}, into);
}

// Each rank adds a part. All ranks decode the sums, so that they are equal everywhere.
void EncodedCollective::all_reduce(const ConstView& all, const View& into) {
  const CodeBits bits = encoding_.sums;
  require_memory(kernels::encoded_all_reduce_bytes(all.count(), group_.size(), encoding_.values, bits));
  const Parts parts{all.count(), kernels::part_of_groups(all.count(), group_.size())};
  const std::size_t rank = group_.rank();
  const View mine = into.part(parts.begin(rank), parts.clip(rank, {0, parts.part}).count);
  add_parts(all, parts, mine);
  encode(mine, Rounded::result, rank, parts.number(rank, 0),
         {bits, memory(rank * encoded_part_bytes(parts.part, bits), quantized_bytes(mine.count(), bits))});
  hand_out(parts, bits, into);
}

void EncodedCollective::require_memory(std::size_t bytes) const {
  require(encoding_.memory.bytes() >= bytes, Code::wrong_size, [&] {
    return Problem{.what = "cannot start an encoded collective: the memory for its codes is too small",
                   .needed = fmt::format("{} bytes", bytes),
                   .available = fmt::format("{} bytes", encoding_.memory.bytes())};
  });
}

// Sends this rank's part, which lies encoded at its place in the memory, to all ranks, and decodes those of all.
void EncodedCollective::hand_out(const Parts& parts, CodeBits bits, const View& all) {
  const std::size_t bytes = encoded_part_bytes(parts.part, bits);
  gather_(call_, memory(group_.rank() * bytes, bytes), memory(0, group_.size() * bytes));
  for (std::size_t rank = 0; rank < group_.size(); ++rank) {
    const std::size_t count = parts.clip(rank, {0, parts.part}).count;
    backend_.dequantize({bits, memory(rank * bytes, quantized_bytes(count, bits))}, all.part(parts.begin(rank), count));
  }
}

// Encodes a stretch of the part that this rank sends to `rank`.
void EncodedCollective::encode_part(const ConstView& all, const Parts& parts, std::size_t rank,
                                    const Stretch& stretch) {
  const CodeBits bits = encoding_.values;
  const Stretch there = parts.clip(rank, stretch);
  const std::size_t first = parts.begin(rank) + there.first;
  const std::size_t at = rank * encoded_part_bytes(parts.part, bits) + bytes_before(there.first, bits);
  if (there.count == 0) return;
  encode(all.part(first, there.count), Rounded::values, group_.rank(), parts.number(rank, there.first),
         {bits, memory(at, quantized_bytes(there.count, bits))});
}

// Writes the sum of this rank's part into `into`, which has its elements.
void EncodedCollective::add_parts(const ConstView& all, const Parts& parts, const View& into) {
  if (levels_ != nullptr) return add_in_two_levels(all, parts, into);
  const CodeBits bits = encoding_.values;
  exchange_together(
      group_,
      {.call = call_,
       .values = memory(0, quantized_bytes(parts.part, bits)),
       .stride = encoded_part_bytes(parts.part, bits),
       .block_bytes = exchanged_block_bytes(bits)},
      [&](std::size_t first, std::size_t count) {
        for (std::size_t rank = 0; rank < group_.size(); ++rank) {
          encode_part(all, parts, rank, {elements_of(first, bits), elements_of(count, bits)});
        }
      },
      [&](std::span<const ConstView> by_rank, std::size_t first) {
        const std::size_t most = elements_of(by_rank.front().bytes(), bits);
        const auto [at, count] = parts.clip(group_.rank(), {elements_of(first, bits), most});
        if (count > 0) sum_by_host(by_rank, parts.number(group_.rank(), at), into.part(at, count));
      });
}

// `first`: the number of the sum's first element.
void EncodedCollective::sum_by_host(std::span<const ConstView> by_rank, std::size_t first, const View& into) {
  const std::size_t neighbours = group_.ranks_per_host();
  const std::vector<ConstView> arrays = beginnings(by_rank, quantized_bytes(into.count(), encoding_.values));
  if (neighbours == 1) return backend_.sum_quantized(arrays, encoding_.values, into);
  const std::size_t hosts = arrays.size() / neighbours;
  const std::size_t bytes = quantized_bytes(into.count(), encoding_.sums);
  std::byte* const scratch = group_.scratch(into.count() * sizeof(float) + hosts * bytes);
  const View sum(scratch, into.count(), DType::fp32);
  std::vector<ConstView> by_host;
  for (std::size_t host = 0; host < hosts; ++host) {
    const View codes(scratch + sum.bytes() + host * bytes, bytes, DType::u8);
    backend_.sum_quantized(std::span(arrays).subspan(host * neighbours, neighbours), encoding_.values, sum);
    encode(sum, Rounded::sums_of_hosts, host, first, {encoding_.sums, codes});
    by_host.push_back(codes);
  }
  backend_.sum_quantized(by_host, encoding_.sums, into);
}

// Quantizes tensor by tensor.
void EncodedCollective::encode(const ConstView& values, Rounded what, std::size_t rounder, std::size_t first,
                               const kernels::Quantized& to) {
  const std::uint64_t stream = kernels::rounding_stream(static_cast<std::uint64_t>(what), rounder, encoding_.stream);
  std::size_t done = 0;
  while (done < values.count()) {
    const std::size_t number = first + done;
    const auto next = std::ranges::upper_bound(encoding_.tensors, number, {}, &kernels::Run::begin);
    const bool has_tensor = next != encoding_.tensors.begin();
    const bool is_last = next == encoding_.tensors.end();
    const std::size_t count = std::min(values.count() - done, is_last ? values.count() : next->begin - number);
    kernels::CodeRounding rounding{.stochastic = true, .stream = stream, .first_index = number};
    if (has_tensor) {
      const kernels::Run& tensor = *std::prev(next);
      rounding.stream = kernels::stream_of_tensor(stream, tensor.tensor);
      rounding.first_index = encoding_.first_index + number - tensor.tensor_begin;
    }
    backend_.quantize(values.part(done, count),
                      {to.bits, to.blocks.part(bytes_before(done, to.bits), quantized_bytes(count, to.bits))},
                      rounding);
    done += count;
  }
}

// The sums inside this host are made and encoded piece by piece, while those before are on their way to the other hosts.
void EncodedCollective::add_in_two_levels(const ConstView& all, const Parts& parts, const View& into) {
  const CodeBits bits = encoding_.sums;
  Transport& across = levels_->across();
  const std::size_t neighbours = levels_->inside().size();
  const std::size_t bytes = encoded_part_bytes(parts.part, bits), codes_bytes = across.size() * bytes;
  std::byte* const scratch = across.scratch(codes_bytes + parts.part * sizeof(float));
  const View codes(scratch, codes_bytes, DType::u8);
  const View sum(scratch + codes_bytes, parts.part, DType::fp32);
  exchange_together(
      across,
      {.call = call_,
       .values = codes.part(0, quantized_bytes(parts.part, bits)),
       .stride = bytes,
       .block_bytes = exchanged_block_bytes(bits)},
      [&](std::size_t first, std::size_t count) {
        for (std::size_t host = 0; host < across.size(); ++host) {
          const Stretch stretch{elements_of(first, bits), elements_of(count, bits)};
          const std::size_t rank = host * neighbours + levels_->inside().rank();
          add_inside(all, parts, host, stretch, sum);
          const auto [at, there] = parts.clip(rank, stretch);
          encode(sum.part(at, there), Rounded::sums_of_hosts, across.rank(), parts.number(rank, at),
                 {bits, codes.part(host * bytes + bytes_before(at, bits), quantized_bytes(there, bits))});
        }
      },
      [&](std::span<const ConstView> by_host, std::size_t first) {
        const std::size_t most = elements_of(by_host.front().bytes(), bits);
        const auto [at, count] = parts.clip(group_.rank(), {elements_of(first, bits), most});
        if (count == 0) return;
        backend_.sum_quantized(beginnings(by_host, quantized_bytes(count, bits)), bits, into.part(at, count));
      });
}

// Adds the ranks of this host: a stretch of the part of each rank of `host`, of which this one adds that of its own place.
void EncodedCollective::add_inside(const ConstView& all, const Parts& parts, std::size_t host, const Stretch& stretch,
                                   const View& sum) {
  const CodeBits bits = encoding_.values;
  Transport& inside = levels_->inside();
  const std::size_t bytes = encoded_part_bytes(parts.part, bits);
  const std::size_t first_rank = host * inside.size();
  const std::size_t begin = bytes_before(stretch.first, bits);
  const std::size_t sent = quantized_bytes(std::min(stretch.count, parts.part - stretch.first), bits);
  exchange_together(
      inside,
      {.call = call_,
       .values = memory(first_rank * bytes + begin, sent),
       .stride = bytes,
       .block_bytes = exchanged_block_bytes(bits)},
      [&](std::size_t first, std::size_t count) {
        for (std::size_t place = 0; place < inside.size(); ++place) {
          encode_part(all, parts, first_rank + place,
                      {stretch.first + elements_of(first, bits), elements_of(count, bits)});
        }
      },
      [&](std::span<const ConstView> by_rank, std::size_t first) {
        const Stretch arrived{stretch.first + elements_of(first, bits), elements_of(by_rank.front().bytes(), bits)};
        const auto [at, count] = parts.clip(first_rank + inside.rank(), arrived);
        if (count == 0) return;
        backend_.sum_quantized(beginnings(by_rank, quantized_bytes(count, bits)), bits, sum.part(at, count));
      });
}

}  // namespace ballast
