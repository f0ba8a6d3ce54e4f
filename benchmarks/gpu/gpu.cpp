#include "benchmarks/gpu/gpu.h"

#include <cstring>

namespace ballast::benchmarks {
namespace {

constexpr int issues_of_a_run = 4;
constexpr unsigned char byte_of_values = 0x3c;  // bf16 0x3c3c is 0.0115, and fp32 0x3c3c3c3c nearly the same

}  // namespace

TestedGpu::TestedGpu(int gpu) : gpu_(gpu), stream_(gpu), backend_(kernels::cuda_backend(stream_.handle(), gpu)) {}

std::shared_ptr<Buffer> TestedGpu::device(std::size_t bytes) {
  auto made = memory(MemoryKind::device, bytes);
  ballast::fill(made->data(), byte_of_values, bytes, stream_);
  stream_.synchronize();
  return made;
}

std::shared_ptr<Buffer> TestedGpu::host(MemoryKind kind, std::size_t bytes) {
  auto made = memory(kind, bytes);
  std::memset(made->data(), byte_of_values, bytes);
  return made;
}

std::shared_ptr<Buffer> TestedGpu::memory(MemoryKind kind, std::size_t bytes) {
  return std::make_shared<Buffer>(
      allocate(accounts_, {.kind = kind, .bytes = bytes, .owner = "a benchmark", .gpu = gpu_}));
}

Subject TestedGpu::moving(std::size_t bytes, std::function<void()> issue) const {
  return {.work = static_cast<double>(bytes) * issues_of_a_run / 1e9, .run = [this, issue = std::move(issue)] {
            for (int i = 0; i < issues_of_a_run; ++i) {
              issue();
            }
            stream_.synchronize();
          }};
}

}  // namespace ballast::benchmarks
