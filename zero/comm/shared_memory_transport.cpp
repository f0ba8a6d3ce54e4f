#include "zero/comm/shared_memory_transport.h"

#include <algorithm>
#include <cstring>
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

// Where each rank's memory begins; its boxes follow.
struct Desk {
  alignas(line_bytes) Progress given;  // rounds
  alignas(line_bytes) Call calls[turns];
};

std::size_t box_bytes_of(std::size_t size) {
  return std::clamp(boxes_bytes / turns / size, least_box_bytes, most_box_bytes) / line_bytes * line_bytes;
}

class SharedMemoryTransport : public ProcessTransport {
 public:
  SharedMemoryTransport(const ProcessGroup& members, MemoryAccounts& accounts, MakeTransport make)
      : ProcessTransport(members, std::move(make)), error_(group().job().error()), box_bytes_(box_bytes_of(size())) {
    SharedMemory mine = SharedMemory::make(accounts, round_up(sizeof(Desk), line_bytes) + turns * size() * box_bytes_,
                                           "shared memory, group " + group().name());
    new (mine.data()) Desk;
    const std::vector<std::string> invitations = group().ask_all("memory", mine.invitation());
    const std::string problem = open_all(invitations, mine);
    for (const std::string& answer : group().ask_all("mapped", problem)) {
      require(answer.empty(), Code::no_transport, [&] { return Problem{.what = answer}; });
    }
    memories_[rank()].close_door();
  }

  std::size_t round_bytes(Where) const override { return box_bytes_; }

  void round(const Round& given, const Take& take) override {
    error_.check();
    ++round_;
    put(given);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) {
        wait(peer);
        require_same(given.call, desk(peer).calls[turn()], group().member(peer));
      }
      const std::byte* const from = peer == rank() ? given.piece(peer).data() : box(peer, given, rank());
      if (given.gives(peer)) take(peer, {from, given.bytes});
    }
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
      return error.problem().what;
    }
    return {};
  }

  Desk& desk(std::size_t owner) const { return *std::launder(reinterpret_cast<Desk*>(memories_[owner].data())); }
  std::size_t turn() const { return round_ % turns; }

  // What `owner` gives to `reader` in this round; all read the first box where all get the same.
  std::byte* box(std::size_t owner, const Round& given, std::size_t reader) const {
    const std::size_t number = turn() * size() + (given.stride == 0 ? 0 : reader);
    return memories_[owner].data() + round_up(sizeof(Desk), line_bytes) + number * box_bytes_;
  }

  void put(const Round& given) {
    desk(rank()).calls[turn()] = given.call;
    for (std::size_t peer = 0; given.gives(rank()) && peer < size(); ++peer) {
      const bool is_there = given.stride == 0 ? peer > 0 : peer == rank();
      if (!is_there && given.bytes > 0) std::memcpy(box(rank(), given, peer), given.piece(peer).data(), given.bytes);
    }
    desk(rank()).given.advance();
  }

  // For what the peer gives in this round.
  void wait(std::size_t peer) {
    Progress& given = desk(peer).given;
    for (int look = 0; look < looks; ++look) {
      if (given.has_come_to(round_)) return;
      std::this_thread::yield();  // to the other, where both share a core
    }
    Patience(error_, group().job().timeout())
        .wait([&](auto pause) { return given.wait_for(round_, pause); }, [&] { group().give_up_on(peer); });
  }

  FirstError& error_;
  std::size_t box_bytes_;
  std::vector<SharedMemory> memories_;  // by rank
  std::uint32_t round_ = 0;
};

}  // namespace

std::unique_ptr<Transport> shared_memory_transport(const ProcessGroup& group, MemoryAccounts& accounts,
                                                   const MakeTransport& make) {
  return std::make_unique<SharedMemoryTransport>(group, accounts, make);
}

}  // namespace ballast
