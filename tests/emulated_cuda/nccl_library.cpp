// The emulated NCCL as Ballast's.
#include "zero/comm/nccl_library.h"

const ballast::NcclCalls& ballast::nccl_calls() {
  static const NcclCalls calls{.get_unique_id = ncclGetUniqueId,
                               .init_rank = ncclCommInitRankConfig,
                               .destroy = ncclCommDestroy,
                               .abort = ncclCommAbort,
                               .error_string = ncclGetErrorString,
                               .last_error = ncclGetLastError,
                               .group_start = ncclGroupStart,
                               .group_end = ncclGroupEnd,
                               .send = ncclSend,
                               .receive = ncclRecv,
                               .all_gather = ncclAllGather,
                               .asynchronous_error = ncclCommGetAsyncError};
  return calls;
}
