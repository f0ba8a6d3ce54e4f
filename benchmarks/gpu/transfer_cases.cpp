#include <fmt/format.h>

#include "benchmarks/gpu/cases.h"
#include "kernels/runtime/sizes.h"

namespace ballast::benchmarks {
namespace {

enum class Direction { upload, download };

std::string name(Direction direction) { return direction == Direction::upload ? "upload" : "download"; }

// Moves `bytes` in transfers of `piece` bytes, one after another.
Subject transfer(TestedGpu& gpu, Direction direction, MemoryKind kind, std::size_t bytes, std::size_t piece) {
  const auto host = gpu.host(kind, bytes), device = gpu.device(bytes);
  return gpu.moving(bytes, [=, &gpu] {
    for (std::size_t first = 0; first < bytes; first += piece) {
      std::byte* there = device->data() + first;
      std::byte* here = host->data() + first;
      const bool up = direction == Direction::upload;
      copy(up ? there : here, up ? here : there, std::min(piece, bytes - first), gpu.stream());
    }
  });
}

// Half of the bytes go each way at the same time.
Subject both_ways(TestedGpu& gpu, std::size_t bytes) {
  const std::size_t half = bytes / 2;
  const auto from_host = gpu.host(MemoryKind::pinned, half), to_host = gpu.host(MemoryKind::pinned, half);
  const auto to_device = gpu.device(half), from_device = gpu.device(half);
  const auto other = std::make_shared<Stream>();
  return gpu.moving(2 * half, [=, &gpu] {
    copy(to_device->data(), from_host->data(), half, gpu.stream());
    copy(to_host->data(), from_device->data(), half, *other);
    other->synchronize();
  });
}

}  // namespace

std::vector<GpuCase> transfer_cases(std::size_t bytes) {
  std::vector<GpuCase> all;
  for (const Direction direction : {Direction::upload, Direction::download}) {
    const auto whole = [=](TestedGpu& gpu) { return transfer(gpu, direction, MemoryKind::pinned, bytes, bytes); };
    const std::string against = name(direction) + " at once";
    for (const std::size_t piece : {std::size_t{512} << 10, std::size_t{2} << 20, std::size_t{16} << 20}) {
      all.push_back({fmt::format("{} in pieces of {}", name(direction), human_bytes(piece)), against,
                     [=](TestedGpu& gpu) { return transfer(gpu, direction, MemoryKind::pinned, bytes, piece); },
                     whole});
    }
    all.push_back({fmt::format("{} of pageable memory", name(direction)), against,
                   [=](TestedGpu& gpu) { return transfer(gpu, direction, MemoryKind::pageable, bytes, bytes); },
                   whole});
  }
  all.push_back({"upload and download together", "upload at once",
                 [=](TestedGpu& gpu) { return both_ways(gpu, bytes); },
                 [=](TestedGpu& gpu) { return transfer(gpu, Direction::upload, MemoryKind::pinned, bytes, bytes); }});
  return all;
}

}  // namespace ballast::benchmarks
