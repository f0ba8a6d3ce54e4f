// The calls of the emulated NCCL.
#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "kernels/runtime/environment.h"
#include "tests/emulated_cuda/calls.h"
#include "tests/emulated_cuda/devices.h"
#include "tests/emulated_cuda/live.h"
#include "tests/emulated_cuda/memory_access.h"
#include "tests/emulated_cuda/nccl_communicator.h"
#include "tests/emulated_cuda/rules.h"

struct ncclComm {
  std::shared_ptr<emulated::NcclCommunicator> communicator;
};

namespace emulated {
namespace {

struct Grouped {
  ncclComm_t handle;
  NcclOp op;
  cudaStream_t stream;
};

std::mutex mutex;  // guards the map
auto& communicators = never_destroyed<std::map<ncclComm_t, std::shared_ptr<NcclCommunicator>>>();
thread_local int depth = 0;
thread_local std::vector<Grouped> group;

std::shared_ptr<NcclCommunicator> communicator_of(ncclComm_t handle) {
  const std::lock_guard lock(mutex);
  const auto found = communicators.find(handle);
  if (found == communicators.end()) broken("communicators live while they are used", "a call names one that has ended");
  return found->second;
}

std::shared_ptr<NcclCommunicator> take(ncclComm_t handle) {
  const std::shared_ptr<NcclCommunicator> communicator = communicator_of(handle);
  const std::lock_guard lock(mutex);
  communicators.erase(handle);
  delete handle;
  return communicator;
}

bool is_told_to_fail(const char* name) { return end_call(begin_call(name, Context::none)) != cudaSuccess; }

// NCCL chooses the communicator's GPU, and restores the one that the thread had, which makes a context there.
void visit(const NcclCommunicator& communicator, const char* name) {
  if (current_gpu() != communicator.gpu()) use_context(current_gpu(), name);
}

void require_memory(const void* memory, std::size_t bytes) {
  DeviceMemory* const owner = memory_of(memory);
  if (bytes > 0 && (owner == nullptr || !owner->is_allocated(memory, bytes))) {
    broken("NCCL works on allocated memory of a GPU", std::to_string(bytes) + " bytes are not");
  }
}

bool blocks(const ncclConfig_t& config) {
  return ballast::Environment().integer("NCCL_COMM_BLOCKING").value_or(config.blocking) != 0;
}

ncclResult_t add(const char* name, ncclComm_t handle, const NcclOp& op, cudaStream_t stream) {
  if (is_told_to_fail(name)) return ncclSystemError;
  if (communicator_of(handle)->is_in_progress()) return ncclInvalidArgument;
  const auto ranks = static_cast<std::size_t>(communicator_of(handle)->size());
  if (op.from != nullptr) require_memory(op.from, op.bytes);
  if (op.to != nullptr) require_memory(op.to, op.kind == NcclOp::Kind::all_gather ? ranks * op.bytes : op.bytes);
  for (const void* const memory : {op.from, static_cast<const void*>(op.to)}) {
    if (reinterpret_cast<std::uintptr_t>(memory) % 16 != 0) count("NCCL with memory that is not aligned");
  }
  if (stream_of(stream).gpu != communicator_of(handle)->gpu()) return ncclInvalidUsage;
  group.push_back({handle, op, stream});
  return depth > 0 ? ncclSuccess : ncclGroupEnd();
}

ncclResult_t issue_group() {
  std::map<ncclComm_t, std::vector<NcclOp>> by_communicator;
  std::map<ncclComm_t, cudaStream_t> streams;
  ncclResult_t answer = ncclSuccess;
  for (const Grouped& grouped : std::exchange(group, {})) {
    by_communicator[grouped.handle].push_back(grouped.op);
    streams[grouped.handle] = grouped.stream;
  }
  for (auto& [handle, ops] : by_communicator) {
    const auto communicator = communicator_of(handle);
    visit(*communicator, "ncclGroupEnd");
    if (const ncclResult_t result = communicator->issue(std::move(ops), streams[handle]); result != ncclSuccess) {
      return result;
    }
    if (communicator->begin_progress() != ncclSuccess) answer = ncclInProgress;
  }
  return answer;
}

}  // namespace

std::size_t live_communicators() {
  const std::lock_guard lock(mutex);
  return communicators.size();
}

}  // namespace emulated

using emulated::is_told_to_fail;
using emulated::NcclOp;

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (is_told_to_fail("ncclGetUniqueId")) return ncclSystemError;
  std::random_device random;
  const std::string text = std::to_string(::getpid()) + "-" + std::to_string(random());
  *id = {};
  text.copy(id->internal, sizeof id->internal - 1);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (is_told_to_fail("ncclCommInitRankConfig")) return ncclSystemError;
  const int gpu = emulated::current_gpu();
  if (emulated::use_context(gpu, "ncclCommInitRankConfig") != cudaSuccess) return ncclUnhandledCudaError;
  auto made = std::make_shared<emulated::NcclCommunicator>(id.internal, rank, ranks, gpu, emulated::blocks(*config));
  if (const ncclResult_t result = made->connect_all(); result != ncclSuccess) return result;
  auto handle = std::make_unique<ncclComm>(ncclComm{made});
  const std::lock_guard lock(emulated::mutex);
  emulated::communicators[handle.get()] = made;
  *comm = handle.release();
  return made->begin_progress();
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const bool fails = is_told_to_fail("ncclCommDestroy");
  const auto communicator = emulated::take(comm);
  emulated::visit(*communicator, "ncclCommDestroy");
  communicator->destroy();
  return fails ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const bool fails = is_told_to_fail("ncclCommAbort");
  const auto communicator = emulated::take(comm);
  emulated::visit(*communicator, "ncclCommAbort");
  communicator->abort();
  return fails ? ncclSystemError : ncclSuccess;
}

// A call that is told to fail finds the error that it was told.
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  const auto communicator = emulated::communicator_of(comm);
  *error = is_told_to_fail("ncclCommGetAsyncError") ? ncclRemoteError : communicator->progress();
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
  }
  return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) { return "the emulated NCCL keeps no details"; }

ncclResult_t ncclGroupStart() {
  if (is_told_to_fail("ncclGroupStart")) return ncclSystemError;
  ++emulated::depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (emulated::depth > 0 && --emulated::depth > 0) return ncclSuccess;
  if (is_told_to_fail("ncclGroupEnd")) {
    emulated::group.clear();
    return ncclSystemError;
  }
  return emulated::issue_group();
}

ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return emulated::add("ncclSend", comm, {.kind = NcclOp::Kind::send, .from = from, .bytes = count, .peer = peer},
                       stream);
}

ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t stream) {
  return emulated::add("ncclRecv", comm, {.kind = NcclOp::Kind::receive, .to = to, .bytes = count, .peer = peer},
                       stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t, ncclComm_t comm,
                           cudaStream_t stream) {
  return emulated::add("ncclAllGather", comm,
                       {.kind = NcclOp::Kind::all_gather, .from = from, .to = to, .bytes = count}, stream);
}
