#include "tests/emulated_cuda/nccl_exchange.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

using Kind = NcclOp::Kind;
constexpr int look_again_ms = 1;

// Moves as many bytes as the socket takes or has. Returns false if it takes or has none now.
template <class Call>
bool move(Call call, std::size_t& done, std::size_t bytes) {
  const ssize_t moved = call(done, bytes - done);
  if (moved <= 0) return false;
  done += static_cast<std::size_t>(moved);
  return true;
}

}  // namespace

NcclExchange::NcclExchange(int rank, const std::vector<int>& sockets, const std::atomic<bool>& aborted)
    : rank_(static_cast<std::size_t>(rank)), aborted_(aborted) {
  for (const int socket : sockets) {
    peers_.push_back({.socket = socket});
  }
}

void NcclExchange::run(const std::vector<NcclOp>& ops) {
  for (const NcclOp& op : ops) {
    add(op);
  }
  copy_to_self(ops);
  while (!is_over() && !aborted_) {
    progress();
  }
}

void NcclExchange::add(const NcclOp& op) {
  const auto send = [](Peer& to, const void* from, std::size_t bytes) {
    to.sending.push_back({.data = static_cast<std::byte*>(const_cast<void*>(from)), .bytes = bytes, .size = bytes});
  };
  const auto receive = [](Peer& from, std::byte* to, std::size_t bytes) {
    from.receiving.push_back({.data = to, .bytes = bytes});
  };
  if (op.kind == Kind::all_gather) {
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
      if (peer == rank_) continue;
      send(peers_[peer], op.from, op.bytes);
      receive(peers_[peer], static_cast<std::byte*>(op.to) + peer * op.bytes, op.bytes);
    }
    return;
  }
  const auto peer = static_cast<std::size_t>(op.peer);
  if (peer == rank_) return;
  if (op.kind == Kind::send) send(peers_[peer], op.from, op.bytes);
  if (op.kind == Kind::receive) receive(peers_[peer], static_cast<std::byte*>(op.to), op.bytes);
}

// A rank's messages to itself: its sends and receives belong together in their order.
void NcclExchange::copy_to_self(const std::vector<NcclOp>& ops) const {
  std::deque<NcclOp> sent;
  for (const NcclOp& op : ops) {
    if (op.kind == Kind::all_gather) {
      std::byte* const place = static_cast<std::byte*>(op.to) + rank_ * op.bytes;
      if (place != op.from) std::memcpy(place, op.from, op.bytes);
    }
    if (op.kind == Kind::send && static_cast<std::size_t>(op.peer) == rank_) sent.push_back(op);
  }
  for (const NcclOp& op : ops) {
    if (op.kind != Kind::receive || static_cast<std::size_t>(op.peer) != rank_) continue;
    if (sent.empty()) broken("a receive from the own rank has a send in its group", "there is none");
    std::memcpy(op.to, sent.front().from, op.bytes);
    sent.pop_front();
  }
}

bool NcclExchange::is_over() const {
  return std::ranges::all_of(peers_, [](const Peer& peer) { return peer.sending.empty() && peer.receiving.empty(); });
}

void NcclExchange::progress() {
  std::vector<pollfd> waiting;
  bool moved = false;
  for (Peer& peer : peers_) {
    while (!peer.sending.empty() && send(peer)) {
      moved = true;
    }
    while (!peer.receiving.empty() && receive(peer)) {
      moved = true;
    }
    const int events = (peer.sending.empty() ? 0 : POLLOUT) | (peer.receiving.empty() ? 0 : POLLIN);
    if (events != 0) waiting.push_back({peer.socket, static_cast<short>(events), 0});
  }
  if (!moved && !waiting.empty()) ::poll(waiting.data(), waiting.size(), look_again_ms);
}

// Returns whether it made progress. A connection that is lost makes none: NCCL's kernels wait for ever.
bool NcclExchange::send(Peer& peer) {
  Piece& piece = peer.sending.front();
  const auto call = [&](const void* data) {
    return [&, data](std::size_t done, std::size_t bytes) {
      return ::send(peer.socket, static_cast<const std::byte*>(data) + done, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    };
  };
  if (piece.size_done < sizeof piece.size) return move(call(&piece.size), piece.size_done, sizeof piece.size);
  if (piece.done < piece.bytes && !move(call(piece.data), piece.done, piece.bytes)) return false;
  if (piece.done == piece.bytes) peer.sending.pop_front();
  return true;
}

bool NcclExchange::receive(Peer& peer) {
  Piece& piece = peer.receiving.front();
  const auto call = [&](void* data) {
    return [&, data](std::size_t done, std::size_t bytes) {
      return ::recv(peer.socket, static_cast<std::byte*>(data) + done, bytes, MSG_DONTWAIT);
    };
  };
  if (piece.size_done < sizeof piece.size) {
    if (!move(call(&piece.size), piece.size_done, sizeof piece.size)) return false;
    if (piece.size_done == sizeof piece.size && piece.size != piece.bytes) {
      broken("a send and its receive have one size",
             std::to_string(piece.size) + " bytes were sent, " + std::to_string(piece.bytes) + " expected");
    }
    return true;
  }
  if (piece.done < piece.bytes && !move(call(piece.data), piece.done, piece.bytes)) return false;
  if (piece.done == piece.bytes) peer.receiving.pop_front();
  return true;
}

}  // namespace emulated
