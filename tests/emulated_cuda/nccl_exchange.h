// The bytes of one kernel of the emulated NCCL, sent and received through sockets.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "tests/emulated_cuda/nccl_communicator.h"

namespace emulated {

class NcclExchange {
 public:
  NcclExchange(int rank, const std::vector<int>& sockets, const std::atomic<bool>& aborted);
  void run(const std::vector<NcclOp>& ops);  // returns when all bytes are there, or at an abort

 private:
  struct Piece {  // a piece of a message: first its size, then its bytes
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t size = 0;
    std::size_t size_done = 0;
    std::size_t done = 0;
  };
  struct Peer {
    int socket = -1;
    std::deque<Piece> sending{};
    std::deque<Piece> receiving{};
  };

  void add(const NcclOp& op);
  void copy_to_self(const std::vector<NcclOp>& ops) const;
  bool is_over() const;
  void progress();
  static bool send(Peer& peer);
  static bool receive(Peer& peer);

  std::size_t rank_;
  std::vector<Peer> peers_;
  const std::atomic<bool>& aborted_;
};

}  // namespace emulated
