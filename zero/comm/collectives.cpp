#include "zero/comm/collectives.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "kernels/reduction_memory.h"
#include "zero/comm/channel.h"
#include "zero/comm/encoded.h"
#include "zero/comm/exchanges.h"
#include "zero/comm/look_ahead.h"
#include "zero/comm/two_level.h"

namespace ballast {
namespace {

void require_counts(std::size_t count, std::size_t needed) {
  require(count == needed, Code::wrong_size, [&] {
    return Problem{.what = "cannot start a collective: its sizes do not match",
                   .needed = fmt::format("{} elements", needed),
                   .available = fmt::format("{} elements", count)};
  });
}

// Other ranks may still read `all` while sums arrive.
void require_apart(const ConstView& all, const View& into) {
  const bool overlap = all.data() < into.data() + into.bytes() && into.data() < all.data() + all.bytes();
  require(!overlap, Code::bad_argument, [] {
    return Problem{.what = "cannot start a reduction: its source and its target overlap",
                   .needed = "memory of its own for the sum"};
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

Sent sent_by_gather(const ConstView& mine) {
  return {.call = {Collective::all_gather, mine.dtype(), 0, mine.count()}, .values = mine};
}

Sent sent_by_scatter(const ConstView& all, std::size_t count, DType sum) {
  const ConstView first_part = all.part(0, count);
  return {.call = {.kind = Collective::reduce_scatter, .dtype = all.dtype(), .count = count, .sum = sum},
          .values = first_part,
          .stride = first_part.bytes()};
}

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
  std::vector<std::size_t> failed_ranks() const override { return transport_->failed_ranks(); }

  void all_gather(ConstView mine, View all) override {
    together([&] {
      require_counts(all.count(), size() * mine.count());
      require_dtype(all.dtype(), mine.dtype());
      gather(with_next(sent_by_gather(mine)), all);
    });
  }

  void reduce_scatter(ConstView all, View into) override {
    together([&] {
      require_counts(all.count(), size() * into.count());
      require_apart(all, into);
      require_sum(into.dtype());
      add_parts(with_next(sent_by_scatter(all, into.count(), into.dtype())), all, into);
    });
  }

  void all_reduce(ConstView all, View into) override {
    together([&] {
      require_counts(all.count(), into.count());
      require_apart(all, into);
      require_sum(into.dtype());
      const Call call{.kind = Collective::all_reduce, .dtype = all.dtype(), .count = all.count(), .sum = into.dtype()};
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
      require_counts(all.count(), size() * mine.count());
      require_dtype(all.dtype(), mine.dtype());
      encoded({.kind = Collective::all_gather, .dtype = mine.dtype(), .count = mine.count()}, encoding)
          .all_gather(mine, all);
    });
  }

  void reduce_scatter(ConstView all, View into, const Encoding& encoding) override {
    if (size() == 1) return reduce_scatter(all, into);
    together([&] {
      require_counts(all.count(), size() * into.count());
      require_apart(all, into);
      require_sum(into.dtype());
      encoded({.kind = Collective::reduce_scatter, .dtype = all.dtype(), .count = into.count(), .sum = into.dtype()},
              encoding)
          .reduce_scatter(all, into);
    });
  }

  void all_reduce(ConstView all, View into, const Encoding& encoding) override {
    if (size() == 1) return all_reduce(all, into);
    together([&] {
      require_counts(all.count(), into.count());
      require_apart(all, into);
      require_sum(into.dtype());
      encoded({.kind = Collective::all_reduce, .dtype = all.dtype(), .count = all.count(), .sum = into.dtype()},
              encoding)
          .all_reduce(all, into);
    });
  }

  std::size_t ranks_per_host() const override { return transport_->ranks_per_host(); }

  SentBytes sent() const override { return transport_->sent() + (has_split_ ? two_level_->sent() : SentBytes{}); }

  void use_look_ahead(LookAhead* of_caller) override {
    look_ahead_ = of_caller;
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
      std::size_t of_self = 0;
      for (const ReceivedPart& part : received) {
        require_rank(part.rank);
        if (part.rank != rank()) {
          from_others.push_back(part);
          continue;
        }
        require_own_parts(of_self < to_self.size() && part.values.bytes() == to_self[of_self].bytes());
        copy(to_self[of_self++], part.values);
      }
      require_own_parts(of_self == to_self.size());
      transport_->exchange_parts({{.kind = Collective::exchange}, to_others, from_others});
    });
  }

  std::unique_ptr<Communicator> split(std::size_t color) override { return split(color, nullptr); }
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
    if (transport_->all_gather(sent.chunk(mine), {all.data(), all.bytes()})) {
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

  std::optional<SentChunk> next_chunk() {
    const std::optional<NextCollective> next = look_ahead_->next();
    if (!next) return std::nullopt;
    const bool is_gather = next->kind == Collective::all_gather;
    if (!is_gather && has_two_levels()) return std::nullopt;  // the sums of this host are not made yet
    const Sent sent = is_gather ? sent_by_gather(next->sent) : sent_by_scatter(next->sent, next->count, next->sum);
    return sent.chunk(sent.values);
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
  std::atomic<bool> has_split_ = false;  // into the groups of two levels
};

}  // namespace

std::unique_ptr<Communicator> make_collectives(std::unique_ptr<Transport> transport, kernels::Backend& backend,
                                               std::shared_ptr<void> owned) {
  return std::make_unique<Collectives>(std::move(transport), backend, std::move(owned));
}

}  // namespace ballast
