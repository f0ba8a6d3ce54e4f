// Ballast's AdamW and its communicator behind a C interface, so that Python processes can run them in turn with others, on memory
// that torch owns. It is for measurements only; the Python package does not use it. Calls return null, or the error's text.
#include <ballast/optim.h>

#include <cstring>
#include <string>

#include "kernels/backend.h"
#include "kernels/runtime/buffer.h"
#include "kernels/state_math.h"
#include "optim/step.h"
#include "zero/comm/connect.h"

namespace {

using namespace ballast;

struct Optimizer {
  std::unique_ptr<kernels::Backend> backend;
  std::string problem{};
};

struct Ranks {
  std::unique_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  MemoryAccounts accounts{};
  std::unique_ptr<Communicator> communicator{};
  Buffer shared{};  // declared after the communicator, so destroyed before it
  std::string problem{};
};

template <class Handle, class Call>
const char* guarded(void* handle, Call&& call) {
  auto& self = *static_cast<Handle*>(handle);
  try {
    call(self);
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

// Integers in the order of the enumerations StateFormat and DType.
struct BallastBenchTile {
  int format;
  int parameter_dtype;
  int gradient_dtype;
  void* parameter;
  const void* gradient;
  void* master;
  void* momentum;
  void* variance;
  float* momentum_scales;
  float* variance_scales;
  std::size_t count;
};

std::size_t ballast_bench_group_size() { return group_size; }

void* ballast_bench_open(int threads) { return new Optimizer{kernels::cpu_backend({.threads = threads})}; }

void ballast_bench_close(void* handle) { delete static_cast<Optimizer*>(handle); }

// Makes step `number`, counted from 1, with torch's default options.
const char* ballast_bench_adamw(void* handle, const BallastBenchTile* tile, std::uint64_t number) {
  return guarded<Optimizer>(handle, [&](Optimizer& self) {
    const auto bytes = [](void* memory) { return static_cast<std::byte*>(memory); };
    const TileMemory update{.format = static_cast<StateFormat>(tile->format),
                            .parameter_dtype = static_cast<DType>(tile->parameter_dtype),
                            .gradient_dtype = static_cast<DType>(tile->gradient_dtype),
                            .parameter = bytes(tile->parameter),
                            .gradient = static_cast<const std::byte*>(tile->gradient),
                            .master = bytes(tile->master),
                            .momentum = bytes(tile->momentum),
                            .variance = bytes(tile->variance),
                            .momentum_scales = tile->momentum_scales,
                            .variance_scales = tile->variance_scales,
                            .count = tile->count,
                            .rounding_stream = number};
    const kernels::Run run{.begin = 0, .count = tile->count, .group = 0};
    const auto group = optim::at(optim::AdamW{}, {.number = number});
    self.backend->update(update, {&run, 1}, {&group, 1});
  });
}

// Joins the job that the environment names. `transport` is a value of the enumeration HostTransport. Returns null on failure.
void* ballast_comm_open(int transport) {
  auto ranks = std::make_unique<Ranks>();
  try {
    ranks->communicator = connect({.transport = static_cast<HostTransport>(transport)},
                                  {.backend = *ranks->backend, .accounts = ranks->accounts});
    return ranks.release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

void ballast_comm_close(void* handle) { delete static_cast<Ranks*>(handle); }

// Returns memory that all ranks read in place, until the next call or the end; null if there is none.
void* ballast_comm_shared_memory(void* handle, std::size_t bytes) {
  auto& self = *static_cast<Ranks*>(handle);
  self.shared = Buffer();
  if (self.communicator->shared_memory() == nullptr) return nullptr;
  const char* problem = guarded<Ranks>(handle, [&](Ranks& ranks) {
    ranks.shared =
        allocate(ranks.accounts, {.bytes = bytes, .owner = "shared", .allocator = ranks.communicator->shared_memory()});
  });
  return problem == nullptr ? self.shared.data() : nullptr;
}

// `count` is of a rank's shard; `dtype` is a value of the enumeration DType.
const char* ballast_comm_all_gather(void* handle, void* mine, void* all, std::size_t count, int dtype) {
  return guarded<Ranks>(handle, [&](Ranks& ranks) {
    ranks.communicator->all_gather(view(mine, count, dtype), view(all, ranks.communicator->size() * count, dtype));
  });
}

const char* ballast_comm_reduce_scatter(void* handle, void* all, float* into, std::size_t count, int dtype) {
  return guarded<Ranks>(handle, [&](Ranks& ranks) {
    ranks.communicator->reduce_scatter(view(all, ranks.communicator->size() * count, dtype),
                                       View(std::span(into, count)));
  });
}

void ballast_comm_copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

}  // extern "C"
