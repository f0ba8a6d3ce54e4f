#include "zero/comm/transport.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/random_math.h"
#include "kernels/reduction_memory.h"
#include "zero/comm/two_level.h"

namespace ballast {

Transport::Transport(std::size_t rank, std::span<const std::string> hosts)
    : rank_(rank), ranks_per_host_(kernels::ranks_per_host(hosts)) {
  std::ranges::transform(hosts, std::back_inserter(is_here_),
                         [&](const std::string& host) { return host == hosts[rank]; });
  ranks_here_ = static_cast<std::size_t>(std::ranges::count(is_here_, true));
}

std::byte* Transport::scratch(std::size_t bytes) {
  scratch_.resize(std::max(scratch_.size(), bytes / sizeof(float)));
  return reinterpret_cast<std::byte*>(scratch_.data());
}

namespace {

using kernels::block_bytes;
using kernels::CodeBits;
using kernels::encoded_part_bytes;
using kernels::exchanged_block_bytes;
using kernels::quantized_bytes;

[[noreturn]] void refuse_encoding() {
  fail(Code::unsupported, {.what = "cannot send codes: the communicator has no encoded collectives",
                           .needed = "Wire without formats, or a communicator of connect()"});
}

void require_counts(std::size_t count, std::size_t needed) {
  require(count == needed, Code::wrong_size, [&] {
    return Problem{.what = "cannot start a collective: its sizes do not match",
                   .needed = fmt::format("{} elements", needed),
                   .available = fmt::format("{} elements", count)};
  });
}

void require_gather(const ConstView& mine, const View& all, std::size_t ranks) {
  require_counts(all.count(), ranks * mine.count());
  require(all.dtype() == mine.dtype(), Code::wrong_dtype, [&] {
    return Problem{.what = "cannot start a collective: source and target have different number formats",
                   .needed = std::string(name(mine.dtype())),
                   .available = std::string(name(all.dtype()))};
  });
}

// `parts`: of the size of `into`. Other ranks may still read `all` while sums arrive.
void require_reduction(const ConstView& all, const View& into, std::size_t parts) {
  require_counts(all.count(), parts * into.count());
  const bool overlap = all.data() < into.data() + into.bytes() && into.data() < all.data() + all.bytes();
  require(!overlap, Code::bad_argument, [] {
    return Problem{.what = "cannot start a reduction: its source and its target overlap",
                   .needed = "memory of its own for the sum"};
  });
  require(into.dtype() == DType::fp32 || into.dtype() == DType::bf16, Code::wrong_dtype, [&] {
    return Problem{.what = "cannot start a collective: its sum has another number format",
                   .needed = "fp32 or bf16",
                   .available = std::string(name(into.dtype()))};
  });
}

// Adds bytes of integers that begin at the byte `first` of the whole array.
void add_integers(const ConstView& theirs, std::size_t first, std::span<std::int64_t> into) {
  const auto* integers = reinterpret_cast<const std::int64_t*>(theirs.data());
  for (std::size_t i = 0; i < theirs.bytes() / sizeof(std::int64_t); ++i) {
    into[first / sizeof(std::int64_t) + i] += integers[i];
  }
}

Sent sent_by_gather(const ConstView& mine) {
  return {.call = {Collective::all_gather, mine.dtype(), 0, mine.count()}, .values = mine};
}

Sent sent_by_scatter(const ConstView& all, std::size_t count, DType sum) {
  const ConstView first_part = all.part(0, count);
  return {.call = {.kind = Collective::reduce_scatter, .dtype = all.dtype(), .count = count, .sum = sum},
          .values = first_part,
          .stride = first_part.bytes()};
}

Call call_of_all_reduce(const ConstView& all, DType sum) {
  return {.kind = Collective::all_reduce, .dtype = all.dtype(), .count = all.count(), .sum = sum};
}

// Writes the bytes `mine` of every rank into `all`, in rank order. `mine` is this rank's part of `all`.
using GatherBytes = std::function<void(const Call& call, const ConstView& mine, const View& all)>;

std::size_t elements_of(std::size_t bytes, CodeBits bits) { return bytes / block_bytes(bits) * group_size; }
std::size_t bytes_before(std::size_t element, CodeBits bits) { return element / group_size * block_bytes(bits); }

// The last block of what arrives may have elements that the part lacks.
std::vector<ConstView> beginnings(std::span<const ConstView> arrays, std::size_t bytes) {
  std::vector<ConstView> parts;
  std::ranges::transform(arrays, std::back_inserter(parts), [&](const ConstView& each) { return each.part(0, bytes); });
  return parts;
}

// Encoded collectives. All ranks decode the same bytes, their own included, so that their results are equal bit by bit. Used by one
// thread, for one call. All that it refers to outlives it. The bits depend on the group's ranks per host, and not on its
// transport: with one level, a rank rounds the sums of hosts as those would for the link.
class EncodedCollective {
 public:
  // `levels`: of a group whose collectives have two levels, else null.
  EncodedCollective(Transport& group, TwoLevel* levels, GatherBytes gather, kernels::Backend& backend, const Call& call,
                    const Encoding& encoding)
      : group_(group),
        levels_(levels),
        gather_(std::move(gather)),
        backend_(backend),
        call_(call),
        encoding_(encoding) {}

  void all_gather(const ConstView& mine, const View& all) {
    const CodeBits bits = encoding_.values;
    require_memory(kernels::encoded_parts_bytes(mine.count(), group_.size(), bits));
    const std::size_t at = group_.rank() * encoded_part_bytes(mine.count(), bits);
    backend_.quantize(mine, {bits, memory(at, quantized_bytes(mine.count(), bits))}, {});
    hand_out({all.count(), mine.count()}, bits, all);
  }

  void reduce_scatter(const ConstView& all, const View& into) {
    require_memory(kernels::encoded_parts_bytes(into.count(), group_.size(), encoding_.values));
    add_parts(all, {all.count(), into.count()}, into);
  }

  // Each rank adds a part. All ranks decode the sums, so that they are equal everywhere.
  void all_reduce(const ConstView& all, const View& into) {
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

 private:
  // What is rounded: no two roundings of an element share random bits.
  enum class Rounded : std::uint8_t { values, sums_of_hosts, result };

  // A stretch of a part, as elements of the part. Encoded, it begins at a block.
  struct Stretch {
    std::size_t first = 0;
    std::size_t count = 0;
  };
  // Elements that are divided into parts of equal size, one for each rank; the last ones may be short, or empty.
  struct Parts {
    std::size_t count = 0;  // all elements
    std::size_t part = 0;
    // Drops what the part lacks.
    Stretch clip(std::size_t rank, const Stretch& stretch) const {
      const std::size_t there = std::min(part, count - begin(rank));
      const std::size_t first = std::min(stretch.first, there);
      return {first, std::min(stretch.count, there - first)};
    }
    std::size_t begin(std::size_t rank) const { return std::min(rank * part, count); }
    // The number of an element of a rank's part, as if each part began at a block.
    std::size_t number(std::size_t rank, std::size_t i) const {
      return rank * kernels::block_count(part) * group_size + i;
    }
  };

  void require_memory(std::size_t bytes) const {
    require(encoding_.memory.bytes() >= bytes, Code::wrong_size, [&] {
      return Problem{.what = "cannot start an encoded collective: the memory for its codes is too small",
                     .needed = fmt::format("{} bytes", bytes),
                     .available = fmt::format("{} bytes", encoding_.memory.bytes())};
    });
  }

  // Sends this rank's part, which lies encoded at its place in the memory, to all ranks, and decodes those of all.
  void hand_out(const Parts& parts, CodeBits bits, const View& all) {
    const std::size_t bytes = encoded_part_bytes(parts.part, bits);
    gather_(call_, memory(group_.rank() * bytes, bytes), memory(0, group_.size() * bytes));
    for (std::size_t rank = 0; rank < group_.size(); ++rank) {
      const std::size_t count = parts.clip(rank, {0, parts.part}).count;
      backend_.dequantize({bits, memory(rank * bytes, quantized_bytes(count, bits))},
                          all.part(parts.begin(rank), count));
    }
  }

  // Encodes a stretch of the part that this rank sends to `rank`.
  void encode_part(const ConstView& all, const Parts& parts, std::size_t rank, const Stretch& stretch) {
    const CodeBits bits = encoding_.values;
    const Stretch there = parts.clip(rank, stretch);
    const std::size_t first = parts.begin(rank) + there.first;
    const std::size_t at = rank * encoded_part_bytes(parts.part, bits) + bytes_before(there.first, bits);
    if (there.count == 0) return;
    encode(all.part(first, there.count), Rounded::values, group_.rank(), parts.number(rank, there.first),
           {bits, memory(at, quantized_bytes(there.count, bits))});
  }

  // Writes the sum of this rank's part into `into`, which has its elements.
  void add_parts(const ConstView& all, const Parts& parts, const View& into) {
    if (levels_ != nullptr) return add_in_two_levels(all, parts, into);
    exchange_values(group_, all, parts, {.stretch = {0, parts.part}},
                    [&](const std::vector<ConstView>& arrays, std::size_t at, std::size_t count) {
                      sum_by_host(arrays, parts.number(group_.rank(), at), into.part(at, count));
                    });
  }

  // What ranks exchange: a stretch of the part of each of them. The first of these ranks has the number `first_rank` among all.
  struct Exchanged {
    std::size_t first_rank = 0;
    Stretch stretch{};
  };

  // Encodes the values for each of the ranks, and calls sum(arrays, at, count) with the codes that all of them send for this
  // rank's part: `count` elements from the element `at` of the part on.
  template <class Sum>
  void exchange_values(Transport& ranks, const ConstView& all, const Parts& parts, const Exchanged& what,
                       const Sum& sum) {
    const std::size_t first_rank = what.first_rank;
    const Stretch stretch = what.stretch;
    const CodeBits bits = encoding_.values;
    const std::size_t bytes = encoded_part_bytes(parts.part, bits);
    const std::size_t sent = quantized_bytes(std::min(stretch.count, parts.part - stretch.first), bits);
    exchange_together(
        ranks,
        {.call = call_,
         .values = memory(first_rank * bytes + bytes_before(stretch.first, bits), sent),
         .stride = bytes,
         .block_bytes = exchanged_block_bytes(bits)},
        [&](std::size_t first, std::size_t count) {
          for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
            encode_part(all, parts, first_rank + rank,
                        {stretch.first + elements_of(first, bits), elements_of(count, bits)});
          }
        },
        [&](std::span<const ConstView> by_rank, std::size_t first) {
          const Stretch arrived{stretch.first + elements_of(first, bits), elements_of(by_rank.front().bytes(), bits)};
          const auto [at, count] = parts.clip(first_rank + ranks.rank(), arrived);
          if (count > 0) sum(beginnings(by_rank, quantized_bytes(count, bits)), at, count);
        });
  }

  // `first`: the number of the sum's first element.
  void sum_by_host(const std::vector<ConstView>& arrays, std::size_t first, const View& into) {
    const std::size_t neighbours = group_.ranks_per_host();
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

  // Rounds stochastically, tensor by tensor. `rounder`: the rank or the host that rounds. `first`: the number of the first value.
  void encode(const ConstView& values, Rounded what, std::size_t rounder, std::size_t first,
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
  void add_in_two_levels(const ConstView& all, const Parts& parts, const View& into) {
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
            exchange_values(levels_->inside(), all, parts, {host * neighbours, stretch},
                            [&](const std::vector<ConstView>& arrays, std::size_t at, std::size_t there) {
                              backend_.sum_quantized(arrays, encoding_.values, sum.part(at, there));
                            });
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

  View memory(std::size_t first, std::size_t bytes) const { return encoding_.memory.part(first, bytes); }

  Transport& group_;
  TwoLevel* levels_;
  GatherBytes gather_;
  kernels::Backend& backend_;
  Call call_;
  Encoding encoding_;
};

class Collectives : public Communicator {
 public:
  Collectives(std::unique_ptr<Transport> transport, kernels::Backend& backend, std::shared_ptr<void> owned)
      : owned_(std::move(owned)), transport_(std::move(transport)), backend_(backend) {}

  std::size_t rank() const override { return transport_->rank(); }
  std::size_t size() const override { return transport_->size(); }
  Allocator* shared_memory() override { return transport_->shared_memory(); }
  bool shares_memory() const override { return transport_->shares_memory(); }
  void abort(std::string_view reason) override { transport_->abort(reason); }
  void leave(const LeaveReason& leave_reason) override { transport_->leave(leave_reason); }
  void set_activity(std::string_view activity) override { transport_->set_activity(activity); }
  std::vector<std::size_t> failed_ranks() const override { return transport_->failed_ranks(); }

  void all_gather(ConstView mine, View all) override {
    together([&] {
      require_gather(mine, all, size());
      gather(with_next(sent_by_gather(mine)), all);
    });
  }

  void reduce_scatter(ConstView all, View into) override {
    together([&] {
      require_reduction(all, into, size());
      add_parts(with_next(sent_by_scatter(all, into.count(), into.dtype())), all, into);
    });
  }

  void all_reduce(ConstView all, View into) override {
    together([&] {
      require_reduction(all, into, 1);
      const Call call = call_of_all_reduce(all, into.dtype());
      const std::size_t part = all.bytes() <= kernels::added_by_all_bytes ? 0 : all.count() / size();
      const std::size_t in_parts = part * size();
      const std::size_t rest = all.count() - in_parts;
      if (part > 0) {
        const View mine = into.part(rank() * part, part);
        add_parts({.call = call, .values = all.part(0, part), .stride = all.part(0, part).bytes()},
                  all.part(0, in_parts), mine);
        gather({.call = call, .values = mine}, into.part(0, in_parts));
      }
      if (rest > 0 || part == 0) add({.call = call, .values = all.part(in_parts, rest)}, into.part(in_parts, rest));
    });
  }

  void all_gather(ConstView mine, View all, const Encoding& encoding) override {
    if (size() == 1) return all_gather(mine, all);
    together([&] {
      require_gather(mine, all, size());
      encoded(sent_by_gather(mine).call, encoding).all_gather(mine, all);
    });
  }

  void reduce_scatter(ConstView all, View into, const Encoding& encoding) override {
    if (size() == 1) return reduce_scatter(all, into);
    together([&] {
      require_reduction(all, into, size());
      encoded(sent_by_scatter(all, into.count(), into.dtype()).call, encoding).reduce_scatter(all, into);
    });
  }

  void all_reduce(ConstView all, View into, const Encoding& encoding) override {
    if (size() == 1) return all_reduce(all, into);
    together([&] {
      require_reduction(all, into, 1);
      encoded(call_of_all_reduce(all, into.dtype()), encoding).all_reduce(all, into);
    });
  }

  std::size_t ranks_per_host() const override { return transport_->ranks_per_host(); }

  SentBytes sent() const override { return transport_->sent() + (has_split_ ? two_level_->sent() : SentBytes{}); }

  void use_look_ahead(LookAhead* look_ahead) override {
    look_ahead_ = look_ahead;
    transport_->drop_sent_ahead();
    if (two_level_) two_level_->across().drop_sent_ahead();
  }

  void use_memory(View received, View sums) override {
    received_ = received;
    sums_ = sums;
    transport_->use_memory(received, sums);
    if (two_level_) two_level_->use_memory(received, sums);
  }

  void all_reduce(std::span<std::int64_t> values) override { all_reduce(values, Purpose::values); }
  void all_reduce(std::span<std::int64_t> values, Purpose purpose) override {
    together([&] {
      const std::vector<std::int64_t> mine(values.begin(), values.end());
      std::ranges::fill(values, 0);
      const Call call{Collective::sum, DType::u8, 0, values.size(), purpose};
      exchange({.call = call, .values = byte_view(std::span(mine)), .where = ChunkMemory::host},
               [&](std::size_t, const ConstView& theirs, std::size_t first) { add_integers(theirs, first, values); });
    });
  }

  void broadcast(View values, std::size_t root) override {
    together([&] {
      require(root < size(), Code::bad_argument, [&] {
        return Problem{.what = fmt::format("cannot broadcast from rank {}: there is no such rank", root),
                       .needed = fmt::format("a rank below {}", size())};
      });
      const Call call{Collective::broadcast, values.dtype(), static_cast<std::uint32_t>(root), values.count()};
      exchange({.call = call, .values = values, .sender = root},
               [&](std::size_t, const ConstView& theirs, std::size_t first) {
                 copy(theirs, values.part(first, theirs.count()));
               });
    });
  }

  void barrier() override {
    together([&] { exchange({.where = ChunkMemory::host}, [](std::size_t, const ConstView&, std::size_t) {}); });
  }

  void exchange(std::span<const SentPart> sent, std::span<const ReceivedPart> received) override {
    together([&] {
      std::vector<SentPart> to_others;
      std::vector<ConstView> to_self;
      for (const SentPart& part : sent) {
        require_rank(part.rank);
        if (part.rank == rank()) {
          to_self.push_back(part.values);
        } else {
          to_others.push_back(part);
          transport_->count_sent_to(part.rank, part.values.bytes());
        }
      }
      std::vector<ReceivedPart> from_others;
      std::size_t next_own = 0;
      for (const ReceivedPart& part : received) {
        require_rank(part.rank);
        if (part.rank != rank()) {
          from_others.push_back(part);
          continue;
        }
        require_own_parts(next_own < to_self.size() && part.values.bytes() == to_self[next_own].bytes());
        copy(to_self[next_own++], part.values);
      }
      require_own_parts(next_own == to_self.size());
      transport_->exchange_parts({{.kind = Collective::exchange}, to_others, from_others});
    });
  }

  std::unique_ptr<Communicator> split(std::size_t color) override { return split(color, nullptr); }
  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    std::unique_ptr<Transport> group;
    together([&] {
      const ConstView mine = byte_view(std::span(&color, 1));
      std::vector<std::size_t> ranks;
      exchange({.call = {.kind = Collective::split}, .values = mine, .where = ChunkMemory::host},
               [&](std::size_t peer, const ConstView& theirs, std::size_t) {
                 if (std::ranges::equal(theirs.as_bytes(), mine.as_bytes())) ranks.push_back(peer);
               });
      group = transport_->split(ranks, channel == nullptr ? std::nullopt : std::optional(channel->stream));
    });
    return make_collectives(std::move(group), channel == nullptr ? backend_ : *channel->backend, owned_);
  }

 private:
  // Aborts the group if the call fails here: otherwise the other ranks would wait for this one.
  template <class Body>
  void together(Body&& body) {
    try {
      body();
    } catch (const std::exception& error) {
      transport_->abort(error.what());
      throw;
    }
  }

  void require_rank(std::size_t peer) const {
    require(peer < size(), Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot exchange parts with rank {}: there is no such rank", peer),
                     .needed = fmt::format("a rank below {}", size())};
    });
  }

  void require_own_parts(bool are_same) const {
    require(are_same, Code::wrong_size, [&] {
      return Problem{.what = fmt::format("rank {} sends itself other parts than it receives from itself", rank()),
                     .needed = "the same number of parts for the rank itself, of the same sizes, in the same order"};
    });
  }

  template <class TakePiece>
  void exchange(const Sent& sent, TakePiece&& take) {
    ballast::exchange(*transport_, sent, take);
  }

  // Peers that read in place read from the gathered array, because many gathers share its memory in turn.
  void gather(Sent sent, View all) {
    const ConstView mine = sent.values;
    if (transport_->all_gather(sent, {all.data(), all.bytes()})) {
      return transport_->count_sent(mine.bytes());
    }
    if (has_two_levels()) return two_level().all_gather(sent, all);
    if (transport_->is_shared(all.as_bytes())) {
      const View own = all.part(rank() * mine.count(), mine.count());
      copy(mine, own);
      sent.values = own;
    }
    exchange(sent, [&](std::size_t peer, const ConstView& theirs, std::size_t first) {
      copy(theirs, all.part(peer * mine.count() + first, theirs.count()));
    });
  }

  // Writes the sum of this rank's part of `all` into `into`.
  void add_parts(const Sent& sent, ConstView all, View into) {
    if (has_two_levels()) return two_level().reduce_scatter(sent.call, all, into);
    add(sent, into);
  }

  void add(const Sent& sent, View into) {
    exchange_together(*transport_, sent, [&](std::span<const ConstView> by_rank, std::size_t first) {
      sum_by_host(*transport_, backend_, by_rank, into.part(first, by_rank.front().count()));
    });
  }

  Sent with_next(Sent sent) const {
    if (look_ahead_ != nullptr) sent.next = &next_chunk_;
    return sent;
  }

  std::optional<Sent> next_chunk() {
    const std::optional<NextCollective> next = look_ahead_->next();
    if (!next) return std::nullopt;
    const bool is_gather = next->kind == Collective::all_gather;
    if (!is_gather && has_two_levels()) return std::nullopt;  // the sums of this host are not made yet
    return is_gather ? sent_by_gather(next->sent) : sent_by_scatter(next->sent, next->count, next->sum);
  }

  bool has_two_levels() const { return transport_->has_links() && transport_->ranks_per_host() > 1; }

  // All ranks make the same first call that needs it.
  TwoLevel& two_level() {
    if (!two_level_) two_level_.emplace(*transport_, backend_).use_memory(received_, sums_);
    has_split_ = true;
    return *two_level_;
  }

  EncodedCollective encoded(Call call, const Encoding& encoding) {
    call.is_encoded = true;
    call.values = encoding.values;
    call.sums = encoding.sums;
    const auto gather_bytes = [this](const Call& of, const ConstView& mine, const View& all) {
      gather({.call = of, .values = mine}, all);
    };
    const bool sums = call.kind != Collective::all_gather;
    return {*transport_, sums && has_two_levels() ? &two_level() : nullptr, gather_bytes, backend_, call, encoding};
  }

  void copy(const ConstView& from, const View& to) {
    if (from.data() != to.data()) backend_.cast(from, to);
  }

  std::shared_ptr<void> owned_;  // outlives the transport
  std::unique_ptr<Transport> transport_;
  kernels::Backend& backend_;
  LookAhead* look_ahead_ = nullptr;
  const NextChunk next_chunk_ = [this] { return next_chunk(); };
  View received_{};  // see use_memory()
  View sums_{};
  std::optional<TwoLevel> two_level_;
  std::atomic<bool> has_split_ = false;  // whether the groups of two levels exist
};

}  // namespace

double Communicator::mean(double mine) {
  std::vector<double> all(size());
  all_gather(ConstView(reinterpret_cast<const std::byte*>(&mine), sizeof mine, DType::u8),
             View(reinterpret_cast<std::byte*>(all.data()), all.size() * sizeof mine, DType::u8));
  return std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
}

void Communicator::all_gather(ConstView, View, const Encoding&) { refuse_encoding(); }
void Communicator::reduce_scatter(ConstView, View, const Encoding&) { refuse_encoding(); }
void Communicator::all_reduce(ConstView, View, const Encoding&) { refuse_encoding(); }

void Communicator::exchange(std::span<const SentPart>, std::span<const ReceivedPart>) {
  fail(Code::unsupported, {.what = "cannot exchange parts of matrices: the communicator has no exchange()",
                           .needed = "a rule other than Muon, or a communicator of connect()"});
}

void Communicator::all_reduce(std::span<std::int64_t> values, Purpose) { all_reduce(values); }

std::unique_ptr<Communicator> Communicator::split(std::size_t color, const Channel* channel) {
  require(channel == nullptr, Code::unsupported, [] {
    return Problem{.what = "cannot make a group for a GPU: the communicator has none",
                   .needed = "a training on the CPU, or a communicator of connect()"};
  });
  return split(color);
}

std::unique_ptr<Communicator> make_collectives(std::unique_ptr<Transport> transport, kernels::Backend& backend,
                                               std::shared_ptr<void> owned) {
  return std::make_unique<Collectives>(std::move(transport), backend, std::move(owned));
}

}  // namespace ballast
