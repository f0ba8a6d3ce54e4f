// NCCL's calls. The library is loaded when the first of them is needed, so one build of Ballast runs with and without it.
#pragma once

#include <nccl.h>

#include <string>

namespace ballast {

struct NcclCalls {
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init_rank = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclCommGetAsyncError) asynchronous_error = nullptr;
};

// Returns the calls of a shared library, which stays loaded. Throws B2301 if it cannot be loaded or lacks one of them.
NcclCalls load_nccl(const std::string& file);

// Returns the calls of the process's NCCL: the one that torch has loaded, or else that of the system. Throws B2301.
const NcclCalls& nccl_calls();

}  // namespace ballast
