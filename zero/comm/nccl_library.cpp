#include "zero/comm/nccl_library.h"

#include <ballast/error.h>
#include <dlfcn.h>

#include <fmt/format.h>

namespace ballast {
namespace {

[[noreturn]] void cannot_use(const std::string& file, const std::string& why) {
  fail(
      Code::no_transport,
      {.what = fmt::format("cannot exchange GPU memory between processes: {} cannot be used", file),
       .available = why,
       .remedy = "Install NCCL: libnccl2, or nvidia-nccl-cu13 from PyPI, which torch with CUDA brings. Or train on one "
                 "GPU."});
}

class Library {
 public:
  explicit Library(const std::string& file) : file_(file), handle_(::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) cannot_use(file_, ::dlerror());
  }

  template <typename Call>
  void find(const char* name, Call& call) const {
    call = reinterpret_cast<Call>(::dlsym(handle_, name));
    if (call == nullptr) cannot_use(file_, fmt::format("it has no {}: it is older than NCCL 2.14", name));
  }

 private:
  const std::string& file_;
  void* handle_;
};

}  // namespace

NcclCalls load_nccl(const std::string& file) {
  const Library library(file);
  NcclCalls calls;
  library.find("ncclGetUniqueId", calls.get_unique_id);
  library.find("ncclCommInitRankConfig", calls.init_rank);
  library.find("ncclCommDestroy", calls.destroy);
  library.find("ncclCommAbort", calls.abort);
  library.find("ncclGetErrorString", calls.error_string);
  library.find("ncclGetLastError", calls.last_error);
  library.find("ncclGroupStart", calls.group_start);
  library.find("ncclGroupEnd", calls.group_end);
  library.find("ncclSend", calls.send);
  library.find("ncclRecv", calls.receive);
  library.find("ncclAllGather", calls.all_gather);
  library.find("ncclCommGetAsyncError", calls.asynchronous_error);
  return calls;
}

}  // namespace ballast
