// An NCCL communicator whose calls the first error of the job ends.
#pragma once

#include <nccl.h>

#include <functional>
#include <memory>
#include <thread>

#include "zero/comm/nccl_watch.h"
#include "zero/comm/process_group.h"

namespace ballast {

// Used by one thread.
class NcclCommunicator {
 public:
  // Connects all ranks of the group. Throws B3302 if one does not arrive in time, and B3301 if NCCL or the job fails.
  NcclCommunicator(const ProcessGroup& group, const GpuStream& stream);
  // Waits a few seconds for the ranks of this host, which destroy theirs too: less if an exception ends this one. After
  // that, a thread that is left behind waits for them.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Issues the calls of `body` as one group. Throws the job's first error, or B3301.
  void issue(const std::function<void(ncclComm_t)>& body);

 private:
  struct Handle;
  class Ender;

  void connect(const GpuStream& stream);
  void with_reason(const std::function<void()>& body);

  ProcessGroup group_;
  FirstError& error_;
  std::chrono::milliseconds timeout_;
  int exceptions_;  // in flight at construction
  std::shared_ptr<Handle> handle_;
  std::unique_ptr<Ender> ender_;
  NcclWatch watch_;
};

void check_nccl(ncclResult_t result);

}  // namespace ballast
