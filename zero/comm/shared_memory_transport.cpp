#include <ballast/error.h>

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <thread>

#include "kernels/runtime/device.h"
#include "kernels/runtime/sizes.h"
#include "zero/comm/process_transport.h"
#include "zero/comm/shared_memory.h"
#include "zero/comm/transport.h"

namespace ballast {
namespace {

constexpr std::size_t max_buffer_bytes = std::size_t{256} << 10;
constexpr std::size_t min_buffer_bytes = std::size_t{16} << 10;
constexpr std::size_t total_buffer_bytes = std::size_t{2} << 20;  // about the size of all buffers of a rank
constexpr std::size_t line_bytes = 64;
// While peers read one set of buffers, the next chunk goes into the other set. The chunk after that finds the first set
// free: every rank has then sent the chunk in between, so it has read all of the first.
constexpr std::size_t sets = 2;
// A rank looks a few times before it sleeps, because a wait is often short. If its core has other work, each look costs
// a whole time slice.
constexpr int spins = 8;

// A counter in shared memory that one process advances and others wait for. Counts wrap around; compared counts differ by less than
// 2^31.
class Progress {
 public:
  // Both sides are sequentially consistent: either the sleeper sees the count, or this thread sees the sleeper.
  void advance() {
    count_.fetch_add(1);
    if (sleepers_.load() > 0) futex(FUTEX_WAKE, INT_MAX, nullptr);
  }

  bool has_reached(std::uint32_t count) const {
    return static_cast<std::int32_t>(count_.load(std::memory_order_acquire) - count) >= 0;
  }

  // Sleeps for up to about `pause`; returns whether the count is reached.
  bool wait_for(std::uint32_t count, std::chrono::nanoseconds pause) {
    sleepers_.fetch_add(1);
    const std::uint32_t seen = count_.load();
    const timespec timeout{0, static_cast<long>(pause.count())};
    if (!has_reached(count)) futex(FUTEX_WAIT, seen, &timeout);
    sleepers_.fetch_sub(1);
    return has_reached(count);
  }

 private:
  void futex(int operation, std::uint32_t value, const timespec* timeout) {
    ::syscall(SYS_futex, &count_, operation, value, timeout, nullptr, 0);
  }

  std::atomic<std::uint32_t> count_ = 0;
  std::atomic<std::uint32_t> sleepers_ = 0;  // 0: no wake-up is needed. A killed sleeper stays counted
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "atomics in shared memory must be lock-free");

// A rank's announcement in an exchange.
struct Announcement {
  Call call{};
  SharedLocation location{};  // the place of an array that is read in place; else the bytes are in the buffers
  std::uint32_t rounds = 0;   // rounds of an exchange of parts that this rank needs for what it sends
};

// Precedes the bytes of parts in a buffer.
struct PartsHeader {
  alignas(line_bytes) PartSizes sizes{};  // all parts of this exchange for the reader
};

// The beginning of each rank's memory; its buffers follow.
struct Header {
  alignas(line_bytes) Progress sent;      // exchanges
  alignas(line_bytes) Progress received;  // exchanges in place
  alignas(line_bytes) Announcement announced[sets];
};

std::size_t buffer_bytes_of(std::size_t size) {
  return std::clamp(total_buffer_bytes / sets / size, min_buffer_bytes, max_buffer_bytes) / line_bytes * line_bytes;
}

class SharedMemoryTransport : public ProcessTransport {
 public:
  SharedMemoryTransport(const ProcessGroup& members, const TransportSetup& how)
      : ProcessTransport(members, how),
        error_(group().job().error()),
        buffer_bytes_(buffer_bytes_of(size())),
        booked_(how.accounts->reserve(MemoryKind::pageable,
                                      round_up(sizeof(Header), line_bytes) + sets * size() * buffer_bytes_,
                                      "shared memory, group " + group().name())),
        pages_(*how.pages),
        stream_(how.stream) {
    for (std::size_t peer = 0; peer < size(); ++peer)
      peers_.emplace_back(stream_ ? std::optional(stream_->gpu) : std::nullopt);
    SharedMemory mine = SharedMemory::make(booked_.bytes(), booked_.owner());
    new (mine.data()) Header;
    const std::vector<std::string> invitations = group().exchange_strings("memory", mine.invitation());
    const std::string problem = open_all(invitations, mine);
    for (const std::string& answer : group().exchange_strings("mapped", problem)) {
      require(answer.empty(), Code::no_transport, [&] { return Problem{.what = answer}; });
    }
    memories_[rank()].close_file();
  }

  std::size_t max_chunk_bytes(ChunkMemory, std::span<const std::byte> bytes) const override {
    return is_shared(bytes) ? std::numeric_limits<std::size_t>::max() : buffer_bytes_;
  }

  Allocator* shared_memory() override { return &pages_; }
  bool shares_memory() const override { return true; }
  bool is_shared(std::span<const std::byte> bytes) const override { return pages_.find(bytes).has_value(); }

  void exchange(const Sent& chunk, const Receive& receive) override {
    chunk.make(0, chunk.bytes());
    error_.check();
    ++exchanges_;
    // It is faster to copy a small chunk into a buffer than to wait until all peers have read it in place.
    chunk.bytes() <= buffer_bytes_ ? exchange_buffered(chunk, receive) : exchange_in_place(chunk, receive);
  }

  // A group with a stream copies what its ranks keep to this rank's GPU. Each rank begins with its own part, so that the ranks read
  // different memory at a time.
  bool all_gather(const Sent& mine, std::span<std::byte> all) override {
    if (!stream_) return false;
    error_.check();
    ++exchanges_;
    device::synchronize(stream_->stream);
    const std::vector<const std::byte*> from = show_in_place(mine);
    for (std::size_t i = 0; i < size(); ++i) {
      const std::size_t peer = (rank() + i) % size();
      device::copy(all.data() + peer * mine.bytes(), from[peer], mine.bytes(), stream_->stream);
    }
    device::synchronize(stream_->stream);
    end_in_place();
    return true;
  }

  // There are as many rounds as the rank with the largest message needs, which all ranks know after the first one.
  void exchange_parts(const Parts& parts) override {
    error_.check();
    const std::size_t most = buffer_bytes_ - sizeof(PartsHeader);
    std::vector<std::vector<ConstView>> sent;
    std::vector<std::vector<View>> received;
    std::size_t largest = 0;
    for (std::size_t peer = 0; peer < size(); ++peer) {
      sent.push_back(parts_of(parts.sent, peer));
      received.push_back(parts_of(parts.received, peer));
      largest = std::max(largest, bytes_in(sent.back()));
    }
    const auto mine = static_cast<std::uint32_t>(std::max<std::size_t>(1, (largest + most - 1) / most));
    std::uint32_t rounds = mine;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      ++exchanges_;
      each_peer([&](std::size_t peer) { put_parts(sent[peer], peer, round * most); });
      announce({.call = parts.call, .rounds = mine});
      each_peer([&](std::size_t peer) {
        wait_sent(peer, parts.call, false);
        rounds = std::max(rounds, header(peer).announced[set_index()].rounds);
        take_parts(received[peer], peer, round * most);
      });
    }
  }

 private:
  void put_parts(const std::vector<ConstView>& sent, std::size_t peer, std::size_t first) const {
    std::byte* const to = buffer_for(rank(), peer);
    new (to) PartsHeader{sizes_of(sent)};
    std::byte* at = to + sizeof(PartsHeader);
    each_stretch(sent, first, buffer_bytes_ - sizeof(PartsHeader), [&](const std::byte* data, std::size_t bytes) {
      std::memcpy(at, data, bytes);
      at += bytes;
    });
  }

  void take_parts(const std::vector<View>& received, std::size_t peer, std::size_t first) const {
    const std::byte* const from = buffer_for(peer, rank());
    const PartSizes sent = std::launder(reinterpret_cast<const PartsHeader*>(from))->sizes;
    require_same_parts(sizes_of(received), sent, group().rank_in_job(peer));
    const std::byte* at = from + sizeof(PartsHeader);
    each_stretch(received, first, buffer_bytes_ - sizeof(PartsHeader), [&](std::byte* data, std::size_t bytes) {
      std::memcpy(data, at, bytes);
      at += bytes;
    });
  }

  // Returns why another rank's memory cannot be mapped, or nothing.
  std::string open_all(const std::vector<std::string>& invitations, SharedMemory& mine) {
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      try {
        memories_.push_back(SharedMemory::open(invitations[peer], booked_.bytes()));
      } catch (const Error& error) {
        if (error.code() != Code::no_transport) throw;
        if (SharedMemory::is_gone(invitations[peer])) group().wait_for_reason(peer);
        return error.problem().what;
      }
    }
    memories_.insert(memories_.begin() + static_cast<std::ptrdiff_t>(rank()), std::move(mine));
    return {};
  }

  Header& header(std::size_t owner) const { return *std::launder(reinterpret_cast<Header*>(memories_[owner].data())); }
  std::size_t set_index() const { return exchanges_ % sets; }

  void exchange_buffered(const Sent& chunk, const Receive& receive) {
    put(chunk);
    announce({.call = chunk.call});
    std::vector<const std::byte*> from;
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) wait_sent(peer, chunk.call, false);
      from.push_back(peer == rank() ? chunk.piece(peer).data() : buffer(peer, chunk, rank()));
    }
    receive(from, chunk.bytes(), 0);
  }

  // Receives piece by piece, so that sums stay in the caches.
  void exchange_in_place(const Sent& chunk, const Receive& receive) {
    std::vector<const std::byte*> from = show_in_place(chunk);
    const std::size_t most = chunk.piece_bytes(buffer_bytes_);
    for (std::size_t first = 0; first < chunk.bytes(); first += most) {
      const std::size_t bytes = std::min(most, chunk.bytes() - first);
      receive(from, bytes, first);
      for (const std::byte*& data : from) {
        data += bytes;
      }
    }
    end_in_place();
  }

  // Returns where the bytes of each rank for this one are, until end_in_place().
  std::vector<const std::byte*> show_in_place(const Sent& chunk) {
    announce({.call = chunk.call, .location = location_of(chunk)});
    std::vector<const std::byte*> from(size(), chunk.data());
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) from[peer] = map_peer(peer, wait_sent(peer, chunk.call, true), chunk.all(size()).size());
      from[peer] += rank() * chunk.stride;
    }
    return from;
  }

  void end_in_place() {  // waits until all peers have read this rank's chunk
    ++in_place_exchanges_;
    header(rank()).received.advance();
    each_peer([&](std::size_t peer) { wait(peer, header(peer).received, in_place_exchanges_); });
  }

  const std::byte* map_peer(std::size_t peer, const SharedLocation& location, std::size_t bytes) {
    try {
      return peers_[peer].at(location, bytes, memories_[peer]);
    } catch (const Error&) {
      group().wait_for_reason(peer);  // the memory of an ended process cannot be mapped
      throw;
    }
  }

  SharedLocation location_of(const Sent& chunk) const {
    const auto location = pages_.find(chunk.all(size()));
    require(location.has_value(), Code::internal,
            [] { return Problem{.what = "cannot send a chunk: it is larger than a buffer"}; });
    return *location;
  }

  // The buffer that `reader` reads of `owner` in this exchange. If all ranks get the same bytes, all read the first
  // buffer.
  std::byte* buffer(std::size_t owner, const Sent& chunk, std::size_t reader) const {
    return buffer_for(owner, chunk.stride == 0 ? 0 : reader);
  }
  std::byte* buffer_for(std::size_t owner, std::size_t reader) const {
    const std::size_t number = set_index() * size() + reader;
    return memories_[owner].data() + round_up(sizeof(Header), line_bytes) + number * buffer_bytes_;
  }

  void put(const Sent& chunk) {
    for (std::size_t peer = 0; chunk.sends(rank()) && peer < size(); ++peer) {
      const bool is_there = chunk.stride == 0 ? peer > 0 : peer == rank();
      if (!is_there && chunk.bytes() > 0)
        std::memcpy(buffer(rank(), chunk, peer), chunk.piece(peer).data(), chunk.bytes());
    }
  }

  void announce(const Announcement& announcement) {
    header(rank()).announced[set_index()] = announcement;
    header(rank()).sent.advance();
  }

  // Waits for the peer's announcement, and returns the location of its chunk.
  const SharedLocation& wait_sent(std::size_t peer, const Call& call, bool in_place) {
    wait(peer, header(peer).sent, exchanges_);
    const Announcement& theirs = header(peer).announced[set_index()];
    require_same(call, theirs.call, group().member(peer));
    require((theirs.location.file >= 0) == in_place, Code::bad_argument, [&] {
      const std::string_view where[] = {"private memory", "shared memory"};
      return Problem{.what = fmt::format("{} gives a collective {}", group().member(peer), where[!in_place]),
                     .needed = fmt::format("{}, as this rank does", where[in_place]),
                     .remedy = "Give it memory of Communicator::shared_memory() on all ranks, or on none."};
    });
    return theirs.location;
  }

  void wait(std::size_t peer, Progress& progress, std::uint32_t until) {
    for (int look = 0; look < spins; ++look) {
      if (progress.has_reached(until)) return;
      std::this_thread::yield();  // the peer runs meanwhile, if both share a core
    }
    const auto is_done_within = [&](std::chrono::nanoseconds pause) {
      const bool has_left =
          group().has_left(peer) || group().job().hub_is_gone();  // read before the wait: see has_left()
      if (progress.wait_for(until, has_left ? std::chrono::nanoseconds(0) : pause)) return true;
      if (has_left) group().fail_after_leave(peer);
      return false;
    };
    const Job::Wait waiting = group().wait_for(peer);
    Deadline(error_, group().job().timeout()).wait(is_done_within, [&] { group().fail_late(peer); });
  }

  FirstError& error_;
  std::size_t buffer_bytes_;
  Reservation booked_;
  std::vector<SharedMemory> memories_;  // one for each rank
  SharedPages& pages_;                  // the pages of this process
  std::optional<GpuStream> stream_;     // of gathers from host memory
  std::vector<PeerPages> peers_;        // the pages of the other processes
  std::uint32_t exchanges_ = 0;
  std::uint32_t in_place_exchanges_ = 0;
};

}  // namespace

std::unique_ptr<Transport> shared_memory_transport(const ProcessGroup& group, const TransportSetup& setup) {
  return std::make_unique<SharedMemoryTransport>(group, setup);
}

}  // namespace ballast
