// A communicator of the emulated NCCL: sockets to every peer, in this process or another one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/runtime/system_resources.h"
#include "tests/emulated_cuda/include/nccl.h"
#include "tests/emulated_cuda/memory_order.h"

namespace emulated {

struct NcclOp {
  enum class Kind { send, receive, all_gather };
  Kind kind;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t bytes = 0;
  int peer = 0;
};

class NcclCommunicator : public std::enable_shared_from_this<NcclCommunicator> {
 public:
  NcclCommunicator(const std::string& id, int rank, int size, int gpu, bool blocks);

  int gpu() const { return gpu_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  ncclResult_t connect_all();                                        // waits for all ranks
  ncclResult_t issue(std::vector<NcclOp> ops, cudaStream_t stream);  // waits for peers that it has not exchanged with
  void abort();                                                      // ends all that waits for peers
  void destroy();  // waits for the work that was issued, and for the ends of all peers that it has exchanged with

  // Where calls do not block, a call is in progress until it was asked about a few times. No other may begin meanwhile.
  ncclResult_t begin_progress();
  ncclResult_t progress();
  bool is_in_progress() const { return asks_left_ > 0; }

 private:
  struct Peer {
    ballast::Descriptor control;
    ballast::Descriptor data;
    bool has_met = false;
  };

  ncclResult_t accept_higher_ranks(int listener);
  ncclResult_t connect_to(int peer);
  ncclResult_t meet_peers_of(const std::vector<NcclOp>& ops);
  std::vector<Access> accesses_of(const std::vector<NcclOp>& ops) const;
  void run_kernel(const std::vector<NcclOp>& ops);
  void end_kernel();
  void exchange(std::vector<NcclOp> ops);
  void finish();  // waits for the work that was issued
  void say_goodbye() const;

  std::string id_;
  int rank_;
  int size_;
  int gpu_;
  bool blocks_;
  std::atomic<int> asks_left_ = 0;
  std::vector<Peer> peers_;
  std::atomic<bool> aborted_ = false;
  std::mutex mutex_;  // guards the count
  std::condition_variable ended_;
  std::size_t under_way_ = 0;
};

}  // namespace emulated
