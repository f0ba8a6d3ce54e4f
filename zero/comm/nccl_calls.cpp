#include "zero/comm/nccl_library.h"

namespace ballast {

const NcclCalls& nccl_calls() {
  static const NcclCalls calls = load_nccl("libnccl.so.2");
  return calls;
}

}  // namespace ballast
