#include "tests/emulated_cuda/nccl_communicator.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/nccl_exchange.h"
#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

constexpr auto look_again = std::chrono::milliseconds(1);

struct Hello {
  int rank = 0;
  int gpu = 0;
  int is_data = 0;
};

// A name that belongs to no file, and ends with its socket.
sockaddr_un address_of(const std::string& id, int rank, socklen_t& bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "emulated-nccl-" + id + "-" + std::to_string(rank);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

ballast::Descriptor make_socket() { return ballast::Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

bool is_readable(int socket) {
  pollfd waiting{socket, POLLIN, 0};
  return ::poll(&waiting, 1, static_cast<int>(look_again.count())) > 0;
}

}  // namespace

NcclCommunicator::NcclCommunicator(const std::string& id, int rank, int size, int gpu, bool blocks)
    : id_(id), rank_(rank), size_(size), gpu_(gpu), blocks_(blocks), peers_(static_cast<std::size_t>(size)) {}

ncclResult_t NcclCommunicator::connect_all() {
  const ballast::Descriptor listener = make_socket();
  socklen_t bytes = 0;
  const sockaddr_un own = address_of(id_, rank_, bytes);
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&own), bytes) != 0 || ::listen(listener.get(), 64) != 0)
    return ncclSystemError;
  for (int peer = 0; peer < rank_; ++peer) {
    if (const ncclResult_t result = connect_to(peer); result != ncclSuccess) return result;
  }
  return accept_higher_ranks(listener.get());
}

ncclResult_t NcclCommunicator::connect_to(int peer) {
  socklen_t bytes = 0;
  const sockaddr_un theirs = address_of(id_, peer, bytes);
  for (const int is_data : {0, 1}) {
    ballast::Descriptor socket = make_socket();
    while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&theirs), bytes) != 0) {
      if (aborted_) return ncclInternalError;
      std::this_thread::sleep_for(look_again);
    }
    const Hello mine{rank_, gpu_, is_data};
    Hello answer{};
    if (::send(socket.get(), &mine, sizeof mine, MSG_NOSIGNAL) != sizeof mine ||
        ::recv(socket.get(), &answer, sizeof answer, MSG_WAITALL) != sizeof answer)
      return ncclRemoteError;
    if (answer.gpu == gpu_) return ncclInvalidUsage;  // "Duplicate GPU detected"
    Peer& to = peers_[static_cast<std::size_t>(peer)];
    (is_data != 0 ? to.data : to.control) = std::move(socket);
  }
  return ncclSuccess;
}

ncclResult_t NcclCommunicator::accept_higher_ranks(int listener) {
  for (int missing = 2 * (size_ - 1 - rank_); missing > 0; --missing) {
    while (!is_readable(listener)) {
      if (aborted_) return ncclInternalError;
    }
    ballast::Descriptor socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    const Hello mine{rank_, gpu_, 0};
    Hello theirs{};
    if (::recv(socket.get(), &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs ||
        ::send(socket.get(), &mine, sizeof mine, MSG_NOSIGNAL) != sizeof mine)
      return ncclRemoteError;
    if (theirs.gpu == gpu_) return ncclInvalidUsage;
    Peer& from = peers_[static_cast<std::size_t>(theirs.rank)];
    (theirs.is_data != 0 ? from.data : from.control) = std::move(socket);
  }
  return ncclSuccess;
}

// The first exchange of two ranks sets up what they exchange through: the caller waits for the other one.
ncclResult_t NcclCommunicator::meet_peers_of(const std::vector<NcclOp>& ops) {
  std::vector<bool> needed(peers_.size());
  for (const NcclOp& op : ops) {
    if (op.kind == NcclOp::Kind::all_gather) needed.assign(peers_.size(), true);
    if (op.kind != NcclOp::Kind::all_gather) needed[static_cast<std::size_t>(op.peer)] = true;
  }
  needed[static_cast<std::size_t>(rank_)] = false;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!needed[peer] || peers_[peer].has_met) continue;
    const char byte = 0;
    if (::send(peers_[peer].control.get(), &byte, 1, MSG_NOSIGNAL) != 1) return ncclRemoteError;
  }
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!needed[peer] || peers_[peer].has_met) continue;
    while (!is_readable(peers_[peer].control.get())) {
      if (aborted_) return ncclInternalError;
    }
    char byte = 0;
    if (::recv(peers_[peer].control.get(), &byte, 1, 0) != 1) return ncclRemoteError;
    peers_[peer].has_met = true;
  }
  return ncclSuccess;
}

ncclResult_t NcclCommunicator::issue(std::vector<NcclOp> ops, cudaStream_t handle) {
  if (const ncclResult_t result = meet_peers_of(ops); result != ncclSuccess) return result;
  CUstream_st& stream = stream_of(handle);
  {
    const std::lock_guard lock(mutex_);
    ++under_way_;
  }
  count("NCCL kernel");
  std::vector<Access> accesses = accesses_of(ops);
  const auto self = shared_from_this();
  const IssuedPtr work =
      stream.issue("NCCL", std::move(accesses), [self, ops = std::move(ops)] { self->run_kernel(ops); });
  order_on_gpu(this, device(gpu_).nccl_order, work);
  stream.queue->want(stream.add([self] { self->end_kernel(); }));  // a peer may wait for it
  return ncclSuccess;
}

// An all-gather in place reads this rank's part of its target, and writes the others.
std::vector<Access> NcclCommunicator::accesses_of(const std::vector<NcclOp>& ops) const {
  std::vector<Access> accesses;
  const auto own = static_cast<std::size_t>(rank_), all = static_cast<std::size_t>(size_);
  for (const NcclOp& op : ops) {
    if (op.kind == NcclOp::Kind::receive) accesses.push_back({op.to, op.bytes, true});
    if (op.kind != NcclOp::Kind::receive) accesses.push_back({op.from, op.bytes, false});
    if (op.kind != NcclOp::Kind::all_gather) continue;
    const auto* const to = static_cast<const std::byte*>(op.to);
    const bool is_in_place = to + own * op.bytes == op.from;
    accesses.push_back({to, (is_in_place ? own : all) * op.bytes, true});
    if (is_in_place) accesses.push_back({to + (own + 1) * op.bytes, (all - own - 1) * op.bytes, true});
  }
  return accesses;
}

// Kernels that exchange with peers may need the whole GPU.
void NcclCommunicator::run_kernel(const std::vector<NcclOp>& ops) {
  Device& gpu = device(gpu_);
  std::unique_lock alone(gpu.nccl_kernel, std::try_to_lock);
  while (!alone.owns_lock() && !aborted_) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    alone.try_lock();
  }
  if (!aborted_ && !context_has_failed()) exchange(ops);
}

void NcclCommunicator::end_kernel() {
  const std::lock_guard lock(mutex_);
  --under_way_;
  ended_.notify_all();
}

void NcclCommunicator::exchange(std::vector<NcclOp> ops) {
  for (NcclOp& op : ops) {
    give_access(&op, sizeof op);
  }
  std::vector<int> sockets;
  for (const Peer& peer : peers_) {
    sockets.push_back(peer.data.get());
  }
  NcclExchange(rank_, sockets, aborted_).run(ops);
}

ncclResult_t NcclCommunicator::begin_progress() {
  if (blocks_) return ncclSuccess;
  asks_left_ = 3;
  return ncclInProgress;
}

ncclResult_t NcclCommunicator::progress() {
  if (asks_left_ == 0) return ncclSuccess;
  --asks_left_;
  return ncclInProgress;
}

void NcclCommunicator::abort() {
  aborted_ = true;
  finish();
  say_goodbye();
}

// NCCL's service threads end when those of the peers that are connected to them close their connections.
void NcclCommunicator::destroy() {
  finish();
  say_goodbye();
  for (const Peer& peer : peers_) {
    char byte = 0;
    if (peer.has_met && ::recv(peer.control.get(), &byte, 1, 0) > 0)
      broken("peers that met say goodbye once", "a byte");
  }
}

void NcclCommunicator::say_goodbye() const {
  for (const Peer& peer : peers_) {
    ::shutdown(peer.control.get(), SHUT_WR);
  }
}

void NcclCommunicator::finish() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return under_way_ == 0; });
}

}  // namespace emulated
