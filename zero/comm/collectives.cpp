#include "zero/comm/collectives.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "zero/comm/channel.h"

namespace ballast {
namespace {

// Up to this size every rank of an all-reduce adds everything, in one exchange. Above it each rank adds a part, and the
// parts are gathered. Both give the same bits.
constexpr std::size_t small_bytes = 64 * 1024;

void require_counts(std::size_t count, std::size_t needed) {
  require(count == needed, Code::wrong_size, [&] {
    return Problem{.what = "cannot start a collective: its sizes do not match",
                   .needed = fmt::format("{} elements", needed),
                   .available = fmt::format("{} elements", count)};
  });
}

void require_dtype(DType dtype, DType needed) {
  require(dtype == needed, Code::wrong_dtype, [&] {
    return Problem{.what = "cannot start a collective: source and target have different number formats",
                   .needed = std::string(name(needed)),
                   .available = std::string(name(dtype))};
  });
}

void require_sum(DType dtype) {
  require(dtype == DType::fp32 || dtype == DType::bf16, Code::wrong_dtype, [&] {
    return Problem{.what = "cannot start a collective: its sum has another number format",
                   .needed = "fp32 or bf16",
                   .available = std::string(name(dtype))};
  });
}

template <class T>
ConstView bytes_of(const T& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.data(), bytes.size(), DType::u8};
}

// Adds bytes of integers that begin at the byte `first` of the whole array.
void add_integers(const ConstView& theirs, std::size_t first, std::span<std::int64_t> into) {
  const auto* integers = reinterpret_cast<const std::int64_t*>(theirs.data());
  for (std::size_t i = 0; i < theirs.bytes() / sizeof(std::int64_t); ++i) {
    into[first / sizeof(std::int64_t) + i] += integers[i];
  }
}

// The values that a rank sends in a collective of any number of exchanges: `values` to each rank; those for rank p
// begin p * stride bytes later.
struct Sent {
  Call call{};
  ConstView values{};
  std::size_t stride = 0;
  std::size_t sender = all_ranks;
  ChunkMemory where = ChunkMemory::backend;

  // The chunk of one exchange, which is a part of the values.
  SentChunk chunk(const ConstView& part) const { return {call, part.data(), part.bytes(), stride, sender, where}; }
};

class Collectives : public Communicator {
 public:
  Collectives(std::unique_ptr<Transport> transport, kernels::Backend& backend, std::shared_ptr<void> owned)
      : owned_(std::move(owned)), transport_(std::move(transport)), backend_(backend) {}

  std::size_t rank() const override { return transport_->rank(); }
  std::size_t size() const override { return transport_->size(); }
  Allocator* shared_memory() override { return transport_->shared_memory(); }
  void abort(std::string_view reason) override { transport_->abort(reason); }
  void leave(const LeaveReason& leave_reason) override { transport_->leave(leave_reason); }
  void set_activity(std::string_view activity) override { transport_->set_activity(activity); }

  void all_gather(ConstView mine, View all) override {
    together([&] {
      require_counts(all.count(), size() * mine.count());
      require_dtype(all.dtype(), mine.dtype());
      gather({Collective::all_gather, mine.dtype(), 0, mine.count()}, mine, all);
    });
  }

  void reduce_scatter(ConstView all, View into) override {
    together([&] {
      require_counts(all.count(), size() * into.count());
      require_sum(into.dtype());
      add_parts({.kind = Collective::reduce_scatter, .dtype = all.dtype(), .count = into.count(), .sum = into.dtype()},
                all, into);
    });
  }

  void all_reduce(ConstView all, View into) override {
    together([&] {
      require_counts(all.count(), into.count());
      require_sum(into.dtype());
      const Call call{.kind = Collective::all_reduce, .dtype = all.dtype(), .count = all.count(), .sum = into.dtype()};
      const std::size_t part = all.bytes() <= small_bytes ? 0 : all.count() / size();
      const std::size_t in_parts = part * size();
      const std::size_t rest = all.count() - in_parts;
      if (part > 0) {
        const View mine = into.part(rank() * part, part);
        add_parts(call, all.part(0, in_parts), mine);
        gather(call, mine, into.part(0, in_parts));
      }
      add({.call = call, .values = all.part(in_parts, rest)}, into.part(in_parts, rest));
    });
  }

  void all_reduce(std::span<std::int64_t> values, Purpose purpose) override {
    together([&] {
      const std::vector<std::int64_t> mine(values.begin(), values.end());
      std::ranges::fill(values, 0);
      const Call call{Collective::sum, DType::u8, 0, values.size(), purpose};
      exchange({.call = call, .values = bytes_of(mine), .where = ChunkMemory::host},
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

  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    std::unique_ptr<Transport> group;
    together([&] {
      const ConstView mine = bytes_of(std::span(&color, 1));
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

  // Sends in chunks; at least one, because peers expect it. Calls take(peer, piece, first); the piece begins at the
  // element `first` of what the peer sends.
  template <class TakePiece>
  void exchange(const Sent& sent, TakePiece&& take) {
    const std::size_t width = byte_size(sent.values.dtype());
    each_chunk(sent, [&](const ConstView& mine, std::size_t first) {
      transport_->exchange(sent.chunk(mine), [&](std::size_t peer, std::span<const std::byte> theirs, std::size_t at) {
        take(peer, ConstView(theirs.data(), theirs.size() / width, mine.dtype()), first + at / width);
      });
    });
  }

  template <class Body>
  void each_chunk(const Sent& sent, Body&& body) {
    const ConstView& values = sent.values;
    const std::size_t most =
        transport_->max_chunk_bytes(sent.where, sent.chunk(values).all(size())) / byte_size(values.dtype());
    std::size_t first = 0;
    do {
      const ConstView mine = values.part(first, std::min(most, values.count() - first));
      body(mine, first);
      first += mine.count();
    } while (first < values.count());
  }

  // Peers that read in place read from the gathered array, because many gathers share its memory in turn.
  void gather(const Call& call, ConstView mine, View all) {
    const Sent sent{.call = call, .values = mine};
    if (transport_->all_gather(sent.chunk(mine), {all.data(), all.bytes()})) return;
    if (transport_->is_shared(all.as_bytes())) {
      const View own = all.part(rank() * mine.count(), mine.count());
      copy(mine, own);
      mine = own;
    }
    exchange({.call = call, .values = mine}, [&](std::size_t peer, const ConstView& theirs, std::size_t first) {
      copy(theirs, all.part(peer * mine.count() + first, theirs.count()));
    });
  }

  // Writes the sum of this rank's part of `all` into `into`.
  void add_parts(const Call& call, ConstView all, View into) {
    const ConstView first_part = all.part(0, into.count());
    add({.call = call, .values = first_part, .stride = first_part.bytes()}, into);
  }

  // If all ranks' values are there at once, one pass adds them.
  void add(const Sent& sent, View into) {
    if (transport_->delivers_together(sent.where)) return add_together(sent, into);
    if (into.dtype() != DType::fp32) return add_and_round(sent, into);
    exchange(sent, [&](std::size_t peer, const ConstView& theirs, std::size_t first) {
      add_next(peer, theirs, into.part(first, theirs.count()));
    });
  }

  // Adds a chunk in fp32, and rounds it when all ranks' values are in. Only transports between CPUs deliver rank by rank,
  // and their chunks are small.
  void add_and_round(const Sent& sent, View into) {
    const std::size_t width = byte_size(sent.values.dtype());
    each_chunk(sent, [&](const ConstView& mine, std::size_t first) {
      sums_.resize(std::max(sums_.size(), mine.count()));
      const View sum = View(std::span(sums_)).part(0, mine.count());
      transport_->exchange(sent.chunk(mine), [&](std::size_t peer, std::span<const std::byte> theirs, std::size_t at) {
        const ConstView values(theirs.data(), theirs.size() / width, mine.dtype());
        add_next(peer, values, sum.part(at / width, values.count()));
      });
      backend_.cast(sum, into.part(first, mine.count()));
    });
  }

  void add_next(std::size_t peer, const ConstView& theirs, const View& sum) {
    peer == 0 ? backend_.begin_sum(theirs, sum) : backend_.accumulate(theirs, 1.0f, sum);
  }

  void add_together(const Sent& sent, View into) {
    const std::size_t width = byte_size(sent.values.dtype());
    std::vector<ConstView> theirs(size());
    each_chunk(sent, [&](const ConstView& mine, std::size_t begin) {
      const auto add = [&](std::span<const std::byte* const> by_rank, std::size_t bytes, std::size_t first) {
        std::ranges::transform(by_rank, theirs.begin(),
                               [&](const std::byte* values) { return ConstView(values, bytes / width, mine.dtype()); });
        backend_.sum(theirs, into.part(begin + first / width, bytes / width));
      };
      transport_->exchange_together(sent.chunk(mine), add);
    });
  }

  void copy(const ConstView& from, const View& to) {
    if (from.data() != to.data()) backend_.cast(from, to);
  }

  std::shared_ptr<void> owned_;  // outlives the transport
  std::unique_ptr<Transport> transport_;
  kernels::Backend& backend_;
  std::vector<float> sums_;  // of a chunk, before they are rounded
};

}  // namespace

std::unique_ptr<Communicator> make_collectives(std::unique_ptr<Transport> transport, kernels::Backend& backend,
                                               std::shared_ptr<void> owned) {
  return std::make_unique<Collectives>(std::move(transport), backend, std::move(owned));
}

}  // namespace ballast
