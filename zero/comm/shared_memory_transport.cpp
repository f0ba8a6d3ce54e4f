#include "zero/comm/shared_memory_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <thread>

#include "kernels/runtime/error.h"
#include "kernels/runtime/round_up.h"
#include "zero/comm/progress.h"
#include "zero/comm/shared_memory.h"

namespace ballast {
namespace {

constexpr std::size_t most_box_bytes = std::size_t{256} << 10;
constexpr std::size_t least_box_bytes = std::size_t{16} << 10;
constexpr std::size_t boxes_bytes = std::size_t{2} << 20;  // about what all boxes of a rank take
constexpr std::size_t line_bytes = 64;
// While a round is taken from one set of boxes, the next is put into the other. The one after that finds the first set
// free: every rank has then given of the round in between, so it has taken all of the first.
constexpr std::size_t turns = 2;
// Before a sleep: a wait is often short. But a core that has other work as well gives away a whole slice with each look.
constexpr int looks = 8;

// What is given in a round.
struct Announcement {
  Call call{};
  SharedPlace place{};  // of what is read in place; else it is in the boxes
};

// Where each rank's memory begins; its boxes follow.
struct Desk {
  alignas(line_bytes) Progress given;  // rounds
  alignas(line_bytes) Progress taken;  // of those in which peers are read in place
  alignas(line_bytes) Announcement announced[turns];
};

std::size_t box_bytes_of(std::size_t size) {
  return std::clamp(boxes_bytes / turns / size, least_box_bytes, most_box_bytes) / line_bytes * line_bytes;
}

class SharedMemoryTransport : public ProcessTransport {
 public:
  SharedMemoryTransport(const ProcessGroup& members, std::shared_ptr<SharedPages> pages, MemoryAccounts& accounts,
                        MakeTransport make)
      : ProcessTransport(members, std::move(make)),
        error_(group().job().error()),
        box_bytes_(box_bytes_of(size())),
        booked_(accounts.reserve(MemoryKind::pageable, round_up(sizeof(Desk), line_bytes) + turns * size() * box_bytes_,
                                 "shared memory, group " + group().name())),
        pages_(std::move(pages)),
        peers_(size()) {
    SharedMemory mine = SharedMemory::make(booked_.bytes(), booked_.owner());
    new (mine.data()) Desk;
    const std::vector<std::string> invitations = group().ask_all("memory", mine.invitation());
    const std::string problem = open_all(invitations, mine);
    for (const std::string& answer : group().ask_all("mapped", problem)) {
      require(answer.empty(), Code::no_transport, [&] { return Problem{.what = answer}; });
    }
    memories_[rank()].close_door();
  }

  std::size_t round_bytes(Where, std::span<const std::byte> bytes) const override {
    return is_shared(bytes) ? std::numeric_limits<std::size_t>::max() : box_bytes_;
  }

  Allocator* shared_memory() override { return pages_.get(); }
  bool is_shared(std::span<const std::byte> bytes) const override { return pages_->find(bytes).has_value(); }

  void round(const Round& given, const Take& take) override {
    error_.check();
    ++round_;
    // What fits into a box is sooner copied there than waited for until it is taken.
    given.bytes <= box_bytes_ ? round_by_boxes(given, take) : round_in_place(given, take);
  }

 private:
  // Empty, or why another rank's memory cannot be reached.
  std::string open_all(const std::vector<std::string>& invitations, SharedMemory& mine) {
    try {
      for (std::size_t peer = 0; peer < size(); ++peer) {
        if (peer != rank()) memories_.push_back(SharedMemory::open(invitations[peer]));
      }
      memories_.insert(memories_.begin() + static_cast<std::ptrdiff_t>(rank()), std::move(mine));
    } catch (const Error& error) {
      if (error.code() != Code::no_transport) throw;
      return error.problem().what;
    }
    return {};
  }

  Desk& desk(std::size_t owner) const { return *std::launder(reinterpret_cast<Desk*>(memories_[owner].data())); }
  std::size_t turn() const { return round_ % turns; }

  void round_by_boxes(const Round& given, const Take& take) {
    put(given);
    announce({.call = given.call});
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) wait_given(peer, given.call, false);
      const std::byte* const from = peer == rank() ? given.piece(peer).data() : box(peer, given, rank());
      if (given.gives(peer)) take(peer, {from, given.bytes}, 0);
    }
  }

  // Piece after piece, so that sums stay in the caches. What is given stays until all have taken it.
  void round_in_place(const Round& given, const Take& take) {
    announce({.call = given.call, .place = place_of(given)});
    std::vector<const std::byte*> from(size(), given.data);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) from[peer] = look_at(peer, wait_given(peer, given.call, true));
      from[peer] += rank() * given.stride;
    }
    for (std::size_t first = 0; first < given.bytes; first += box_bytes_) {
      for (std::size_t peer = 0; peer < size(); ++peer) {
        if (given.gives(peer)) take(peer, {from[peer] + first, std::min(box_bytes_, given.bytes - first)}, first);
      }
    }
    ++in_place_;
    desk(rank()).taken.advance();
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) wait(peer, desk(peer).taken, in_place_);
    }
  }

  const std::byte* look_at(std::size_t peer, const SharedPlace& place) {
    try {
      return peers_[peer].at(place, memories_[peer]);
    } catch (const Error&) {
      group().learn_of(peer);  // a process that has ended cannot be looked into
      throw;
    }
  }

  SharedPlace place_of(const Round& given) const {
    const auto place = pages_->find(given.all(size()));
    require(place.has_value(), Code::internal,
            [] { return Problem{.what = "cannot send a chunk: it is larger than a box"}; });
    return *place;
  }

  // What `owner` gives to `reader` in this round; all read the first box where all get the same.
  std::byte* box(std::size_t owner, const Round& given, std::size_t reader) const {
    const std::size_t number = turn() * size() + (given.stride == 0 ? 0 : reader);
    return memories_[owner].data() + round_up(sizeof(Desk), line_bytes) + number * box_bytes_;
  }

  void put(const Round& given) {
    for (std::size_t peer = 0; given.gives(rank()) && peer < size(); ++peer) {
      const bool is_there = given.stride == 0 ? peer > 0 : peer == rank();
      if (!is_there && given.bytes > 0) std::memcpy(box(rank(), given, peer), given.piece(peer).data(), given.bytes);
    }
  }

  void announce(const Announcement& announcement) {
    desk(rank()).announced[turn()] = announcement;
    desk(rank()).given.advance();
  }

  // Where the peer has what it gives in this round.
  const SharedPlace& wait_given(std::size_t peer, const Call& call, bool in_place) {
    wait(peer, desk(peer).given, round_);
    const Announcement& theirs = desk(peer).announced[turn()];
    require_same(call, theirs.call, group().member(peer));
    require((theirs.place.file >= 0) == in_place, Code::bad_argument, [&] {
      const std::string_view where[] = {"private memory", "shared memory"};
      return Problem{.what = fmt::format("{} gives a collective {}", group().member(peer), where[!in_place]),
                     .needed = fmt::format("{}, as this rank does", where[in_place]),
                     .remedy = "Give it memory of Communicator::shared_memory() on all ranks, or on none."};
    });
    return theirs.place;
  }

  void wait(std::size_t peer, Progress& progress, std::uint32_t until) {
    for (int look = 0; look < looks; ++look) {
      if (progress.has_come_to(until)) return;
      std::this_thread::yield();  // to the other, where both share a core
    }
    const auto come_within = [&](std::chrono::nanoseconds pause) {
      const bool has_left =
          group().has_left(peer) || group().job().control().nobody_tells();  // asked first: see has_left()
      if (progress.wait_for(until, has_left ? std::chrono::nanoseconds(0) : pause)) return true;
      if (has_left) group().fail_without(peer);
      return false;
    };
    Patience(error_, group().job().timeout()).wait(come_within, [&] { group().give_up_on(peer); });
  }

  FirstError& error_;
  std::size_t box_bytes_;
  Reservation booked_;
  std::vector<SharedMemory> memories_;  // by rank
  std::shared_ptr<SharedPages> pages_;  // this process's
  std::vector<PeerPages> peers_;        // others'
  std::uint32_t round_ = 0;
  std::uint32_t in_place_ = 0;  // rounds
};

}  // namespace

std::unique_ptr<Transport> shared_memory_transport(const ProcessGroup& group, std::shared_ptr<SharedPages> pages,
                                                   MemoryAccounts& accounts, const MakeTransport& make) {
  return std::make_unique<SharedMemoryTransport>(group, std::move(pages), accounts, make);
}

}  // namespace ballast
