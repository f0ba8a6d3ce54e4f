// The ranks of a job: how a process connects to the others, and their collectives. Every rank of a group makes the same
// calls in the same order.
#pragma once

#include <ballast/log.h>
#include <ballast/memory.h>
#include <ballast/view.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

// The library's own: the GPU stream that a group works on, the codes in which a collective sends values, the collectives that come
// next, and the reason why integers are added.
struct Channel;
struct Encoding;
class LookAhead;
enum class Purpose : std::uint8_t;

// The reason that a rank gives when it leaves its job.
struct LeaveReason {
  std::string words = "it closed its group";
  bool has_failed = false;  // true: all ranks fail; false: only ranks that need this one fail
};

// The bytes that a rank has sent to other ranks, or that those have read in its memory.
struct SentBytes {
  std::size_t inside = 0;  // bytes to ranks of its host
  std::size_t across = 0;  // bytes to other hosts

  friend SentBytes operator+(const SentBytes& one, const SentBytes& other) {
    return {one.inside + other.inside, one.across + other.across};
  }
};

// Values that a rank sends to another one, and memory for those that it receives.
struct SentPart {
  std::size_t rank = 0;  // the other one
  ConstView values{};
};
struct ReceivedPart {
  std::size_t rank = 0;
  View values{};
};

// The functions that are not pure are optional for a communicator of another library.
//
// Threads: one thread at a time uses a communicator. Other threads may use other communicators of the process
// meanwhile. Failure: a call that fails on any rank ends the group. Pending and later calls of all ranks throw B3301
// with the first error.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::size_t rank() const = 0;
  virtual std::size_t size() const = 0;

  // An allocator of host memory that the other ranks of this machine read in place; null if there is none. Large arrays
  // in it are not copied through buffers: `all` of a gather and a scatter, `all` and `into` of an all_reduce, `values`
  // of a broadcast. In one collective the arrays of all ranks lie in such memory, or of none. Release it before the
  // last group ends.
  virtual Allocator* shared_memory() = 0;
  // Whether all ranks are on one machine and reach each other's host memory: that of shared_memory(), or any memory of threads.
  virtual bool shares_memory() const { return false; }

  // Writes every rank's `mine` into `all`, in rank order. `mine` may be its own part of `all`.
  virtual void all_gather(ConstView mine, View all) = 0;
  // Adds the ranks' `all` to zeros, in fp32, and writes this rank's part, or the whole, into `into`: in fp32, or rounded once
  // to bf16. The two do not overlap. The order is that of the ranks. In a group of several hosts with as many neighbouring ranks
  // each, it is that of the ranks of each host, and then that of the hosts: see ConnectOptions::ranks_per_host.
  virtual void reduce_scatter(ConstView all, View into) = 0;
  virtual void all_reduce(ConstView all, View into) = 0;
  // The same with encoded values, which are rounded on their way. A group of one rank sends nothing and rounds nothing. A
  // communicator that does not override them refuses them (B1005).
  virtual void all_gather(ConstView mine, View all, const Encoding& encoding);
  virtual void reduce_scatter(ConstView all, View into, const Encoding& encoding);
  virtual void all_reduce(ConstView all, View into, const Encoding& encoding);
  // The ranks whose values an encoded reduction adds before it encodes the sums for other hosts: ConnectOptions::ranks_per_host.
  virtual std::size_t ranks_per_host() const { return 1; }
  virtual SentBytes sent() const { return {}; }  // bytes in all collectives so far; any thread may call

  // Gives the later reductions of this group memory that its backend reaches, in the order of its stream: for values that other
  // ranks send, and for sums on their way. Its contents are lost. The caller keeps it until other memory, or none, takes its
  // place. Where it is too small the group reserves its own. A group that needs none ignores it.
  virtual void use_memory(View /*received*/, View /*sums*/) {}

  // Lets later gathers and scatters ask, near their ends, for the one that comes next, so that a link does not wait for it. The
  // caller keeps the object until another one, or null, takes its place. It calls this between collectives only.
  virtual void use_look_ahead(LookAhead* /*look_ahead*/) {}

  // Adds integers, which are exact in any order, in place.
  virtual void all_reduce(std::span<std::int64_t> values) = 0;
  // The same, for a purpose that the library's own communicators name in errors.
  virtual void all_reduce(std::span<std::int64_t> values, Purpose purpose);
  // Copies the values of rank `root` to all ranks.
  virtual void broadcast(View values, std::size_t root) = 0;
  virtual void barrier() = 0;
  double mean(double mine);  // the mean of all ranks' values, such as their losses, which they add in rank order

  // Sends parts of any number and size from each rank to any other. The n-th part that a rank sends to another is the n-th that
  // this receives from it, and has as many bytes. Sent and received parts do not overlap. A communicator that does not override
  // it refuses it (B1005).
  virtual void exchange(std::span<const SentPart> sent, std::span<const ReceivedPart> received);

  // Makes one group of the ranks that name the same color, in rank order. With one color for all, it is a second group
  // of the same ranks, for another thread.
  virtual std::unique_ptr<Communicator> split(std::size_t color) = 0;
  // The same, for a GPU's stream if there is a channel. A communicator that does not override it refuses one (B1005).
  virtual std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel);

  // Ends this group and all groups related to it by split(). Any thread may call.
  virtual void abort(std::string_view reason) = 0;

  // Announces that this rank leaves this group and all groups related to it by split(). Waits for no other rank. No
  // collective may follow; if `leave_reason` reports a failure, pending collectives end. Any thread may call; only the
  // first call counts. The end of the last group of a process announces the same.
  virtual void leave(const LeaveReason& leave_reason) = 0;

  // Sets what this rank is doing ("is in step 4"), for error messages. Any thread may call.
  virtual void set_activity(std::string_view activity) = 0;

  // The ranks that have died, left, not arrived or lost a connection, as the first error of all related groups names them, by
  // their numbers in the group that was not split off. None before an error, and for an error that names none. Any thread may
  // call.
  virtual std::vector<std::size_t> failed_ranks() const { return {}; }
};

struct Endpoint {
  std::string host;  // a name or a number
  std::uint16_t port = 0;
};

// The rank and the job of a process.
struct Launch {
  std::string launcher{};  // "torchrun", "Slurm", "Open MPI"; "RANK" for the variables alone; empty: a single rank
  std::size_t rank = 0;
  std::size_t size = 1;
  std::size_t local_rank = 0;  // number among the ranks of its machine: its GPU
  Endpoint hub{};              // the address of rank 0
  std::string job{};           // the same on all ranks of a job, and on those of no other
};

// A key-value store, by which processes exchange addresses before they are connected.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::string get(const std::string& key) = 0;  // waits until it is set
};

// The transport for host memory. `fastest` is shared memory if all ranks are on one machine, else Gloo. It is an error
// (B2301) if the named transport is not available.
enum class HostTransport { fastest, shared_memory, gloo };

struct ConnectOptions {
  std::optional<Launch> launch{};  // replaces the description in the environment of torchrun, Slurm or Open MPI
  KeyValueStore* store = nullptr;  // replaces the address of rank 0; needed until connect() returns
  // The timeout of every wait; BALLAST_TIMEOUT (seconds), or 5 minutes.
  std::optional<std::chrono::milliseconds> timeout{};
  HostTransport transport = HostTransport::fastest;
  // The ranks that count as one host in the order of sums: 1 for rank order, n for the order of hosts with n ranks each, on
  // whatever hosts they are. Without it: BALLAST_RANKS_PER_HOST, or the hosts that there are. The same on all ranks.
  std::optional<std::size_t> ranks_per_host{};
  int threads = 0;     // that add host memory; 0: one for each core that this process may use
  Log* log = nullptr;  // outlives the communicator
};

// Connects this process to the other ranks of its job. Returns when all ranks are connected. Without a launcher, there is
// only one rank.
std::unique_ptr<Communicator> connect(const ConnectOptions& options = {});

// A group of this process alone, whatever its environment says.
std::unique_ptr<Communicator> single_rank();

// Ranks that are threads of this process: a communicator for each thread, in rank order. `ranks_per_host` as above.
std::vector<std::unique_ptr<Communicator>> thread_ranks(std::size_t size, std::size_t ranks_per_host = 1);

// Calls `train` on each rank: on so many threads of this process or, where a launcher has started several processes, on the rank
// that this process is. An exception of a rank ends all ranks. The first one goes to the log of the options, or to stderr. Returns
// the exit status for main().
int run_ranks(std::size_t threads, const std::function<void(Communicator& world)>& train,
              const ConnectOptions& options = {});

}  // namespace ballast
