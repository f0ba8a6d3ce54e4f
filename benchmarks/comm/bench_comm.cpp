// Ballast's communicator behind a C interface, so that Python processes can run it in turn with torch's, on memory that
// torch owns. It is for measurements only; the Python package does not use it.
#include <cstring>
#include <string>

#include "kernels/runtime/buffer.h"
#include "zero/comm/connect.h"

namespace {

using namespace ballast;

struct Handle {
  std::unique_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  MemoryAccounts accounts{};
  std::unique_ptr<Communicator> ranks{};
  Buffer shared{};  // declared after the communicator, so destroyed before it
  std::string problem{};
};

template <class Call>
const char* guarded(void* handle, Call&& call) {
  auto& self = *static_cast<Handle*>(handle);
  try {
    call(*self.ranks);
    return nullptr;
  } catch (const std::exception& error) {
    self.problem = error.what();
    return self.problem.c_str();
  }
}

View view(void* memory, std::size_t count, int dtype) {
  return {static_cast<std::byte*>(memory), count, static_cast<DType>(dtype)};
}

}  // namespace

extern "C" {

// Joins the job that the environment names. `transport` is a value of the enumeration HostTransport. Returns null on
// failure.
void* ballast_comm_open(int transport) {
  auto handle = std::make_unique<Handle>();
  try {
    handle->ranks = connect({.transport = static_cast<HostTransport>(transport)},
                            {.backend = *handle->backend, .accounts = handle->accounts});
    return handle.release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Returns memory that all ranks read in place, until the next call or the end; null if there is none.
void* ballast_comm_shared_memory(void* handle, std::size_t bytes) {
  auto& self = *static_cast<Handle*>(handle);
  self.shared = Buffer();
  if (self.ranks->shared_memory() == nullptr) return nullptr;
  const char* problem = guarded(handle, [&](Communicator& ranks) {
    self.shared = allocate(self.accounts, {.bytes = bytes, .owner = "shared", .allocator = ranks.shared_memory()});
  });
  return problem == nullptr ? self.shared.data() : nullptr;
}

void ballast_comm_close(void* handle) { delete static_cast<Handle*>(handle); }

// `count` is of a rank's shard; `dtype` is a value of the enumeration DType. Both return null, or the error's text.
const char* ballast_comm_all_gather(void* handle, void* mine, void* all, std::size_t count, int dtype) {
  return guarded(handle, [&](Communicator& ranks) {
    ranks.all_gather(view(mine, count, dtype), view(all, ranks.size() * count, dtype));
  });
}

const char* ballast_comm_reduce_scatter(void* handle, void* all, float* into, std::size_t count, int dtype) {
  return guarded(handle, [&](Communicator& ranks) {
    ranks.reduce_scatter(view(all, ranks.size() * count, dtype), View(std::span(into, count)));
  });
}

void ballast_comm_copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
}
