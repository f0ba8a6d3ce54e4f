// Measures kernels on a GPU, relative to a copy in its memory, and transfers, relative to a long one. Each case runs in turn with
// its limit.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>

#include "benchmarks/harness/suite.h"
#include "benchmarks/kernels/elementwise.h"
#include "kernels/runtime/buffer.h"
#include "kernels/runtime/sizes.h"
#include "kernels/runtime/stream.h"

namespace ballast::benchmarks {
namespace {

constexpr int issues_of_a_run = 4;

// The GPU that the cases run on, and its memory. Subjects issue their work several times and then wait for it, so that the wait is
// a small part of what is timed.
class TestedGpu : public Place {
 public:
  // Throws B2101 or B2102 without a GPU.
  explicit TestedGpu(int gpu) : gpu_(gpu), stream_(gpu), backend_(kernels::cuda_backend(stream_.handle(), gpu)) {}

  kernels::Backend& backend() override { return *backend_; }
  const Stream& stream() const { return stream_; }

  std::shared_ptr<std::byte> memory(std::size_t bytes) override {
    auto made = allocated(MemoryKind::device, bytes);
    set(made.get(), byte_of_values, bytes);
    stream_.synchronize();
    return made;
  }
  std::shared_ptr<std::byte> host(MemoryKind kind, std::size_t bytes) {  // filled in the same way
    auto made = allocated(kind, bytes);
    std::memset(made.get(), byte_of_values, bytes);
    return made;
  }
  void set(std::byte* memory, unsigned char byte, std::size_t bytes) override { fill(memory, byte, bytes, stream_); }
  Subject moving(std::size_t bytes, std::function<void()> issue) const override {
    return {.work = static_cast<double>(bytes) * issues_of_a_run / 1e9, .run = [this, issue = std::move(issue)] {
              for (int i = 0; i < issues_of_a_run; ++i) {
                issue();
              }
              stream_.synchronize();
            }};
  }

 private:
  std::shared_ptr<std::byte> allocated(MemoryKind kind, std::size_t bytes) {
    const auto made = std::make_shared<ballast::Buffer>(
        allocate(accounts_, {.kind = kind, .bytes = bytes, .owner = "a benchmark", .gpu = gpu_}));
    return {made, made->data()};
  }

  int gpu_;
  MemoryAccounts accounts_;
  Stream stream_;
  std::unique_ptr<kernels::Backend> backend_;
};

// --- Kernels ---

Subject copy_in_memory(TestedGpu& gpu, std::size_t elements) {
  const std::size_t bytes = elements * 8;
  const auto from = gpu.memory(bytes), to = gpu.memory(bytes);
  return gpu.moving(2 * bytes, [=, &gpu] { copy(to.get(), from.get(), bytes, gpu.stream()); });
}

// `elements` is the size of the large arrays, which must not fit the caches. The GPU is there when a case is made.
std::vector<Trial> kernel_cases(std::shared_ptr<TestedGpu>& gpu, std::size_t elements) {
  std::vector<Trial> all;
  const auto add = [&](std::string name, const std::function<Subject()>& make) {
    all.push_back({std::move(name), "copy", [=, &gpu] { return Pair{make(), copy_in_memory(*gpu, elements)}; }});
  };
  const std::array tiles = {std::pair{"whole", elements}, std::pair{"tiles of 4 Mi", std::size_t{4} << 20},
                            std::pair{"tiles of 256 Ki", std::size_t{256} << 10}};
  for (const StateFormat format : all_state_formats) {
    for (const auto& [name_of_tile, wanted] : tiles) {
      add(fmt::format("adamw {}, {}", name(format), name_of_tile),
          [=, tile = wanted, &gpu] { return adamw(gpu, format, elements, tile); });
    }
  }
  for (const ElementwiseCase& item : elementwise_cases()) {
    add(item.name, [=, &gpu] { return item.make(gpu, elements); });
  }
  return all;
}

// --- Transfers ---

enum class Direction { upload, download };

std::string name(Direction direction) { return direction == Direction::upload ? "upload" : "download"; }

// Moves `bytes` in transfers of `piece` bytes, one after another.
Subject transfer(TestedGpu& gpu, Direction direction, MemoryKind kind, std::size_t bytes, std::size_t piece) {
  const auto host = gpu.host(kind, bytes), device = gpu.memory(bytes);
  return gpu.moving(bytes, [=, &gpu] {
    for (std::size_t first = 0; first < bytes; first += piece) {
      std::byte* there = device.get() + first;
      std::byte* here = host.get() + first;
      const bool up = direction == Direction::upload;
      copy(up ? there : here, up ? here : there, std::min(piece, bytes - first), gpu.stream());
    }
  });
}

// Half of the bytes go each way at the same time.
Subject both_ways(TestedGpu& gpu, std::size_t bytes) {
  const std::size_t half = bytes / 2;
  const auto from_host = gpu.host(MemoryKind::pinned, half), to_host = gpu.host(MemoryKind::pinned, half);
  const auto to_device = gpu.memory(half), from_device = gpu.memory(half);
  const auto other = std::make_shared<Stream>();
  return gpu.moving(2 * half, [=, &gpu] {
    copy(to_device.get(), from_host.get(), half, gpu.stream());
    copy(to_host.get(), from_device.get(), half, *other);
    other->synchronize();
  });
}

std::vector<Trial> transfer_cases(std::shared_ptr<TestedGpu>& gpu, std::size_t bytes) {
  std::vector<Trial> all;
  for (const Direction direction : {Direction::upload, Direction::download}) {
    const auto add = [&](const std::string& title, MemoryKind kind, std::size_t piece) {
      all.push_back({title, fmt::format("{} at once", name(direction)), [=, &gpu] {
                       return Pair{transfer(*gpu, direction, kind, bytes, piece),
                                   transfer(*gpu, direction, MemoryKind::pinned, bytes, bytes)};
                     }});
    };
    for (const std::size_t piece : {std::size_t{512} << 10, std::size_t{2} << 20, std::size_t{16} << 20}) {
      add(fmt::format("{} in pieces of {}", name(direction), human_bytes(piece)), MemoryKind::pinned, piece);
    }
    add(fmt::format("{} of pageable memory", name(direction)), MemoryKind::pageable, bytes);
  }
  all.push_back(
      {"upload and download together", "upload at once", [=, &gpu] {
         return Pair{both_ways(*gpu, bytes), transfer(*gpu, Direction::upload, MemoryKind::pinned, bytes, bytes)};
       }});
  return all;
}

// --- The program ---

void run(const Choice& choice) {
  std::shared_ptr<TestedGpu> gpu;
  std::vector<Trial> trials = kernel_cases(gpu, std::size_t{128} << 20);
  std::ranges::move(transfer_cases(gpu, std::size_t{512} << 20), std::back_inserter(trials));
  if (!choice.list) gpu = std::make_shared<TestedGpu>(0);
  run_trials("gpu", trials, choice);
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  using namespace ballast::benchmarks;
  CLI::App app{"Kernels on a GPU, compared with a copy in its memory; transfers, compared with a long one"};
  Choice choice;
  describe(app, choice);
  return run_program(app, argc, argv, [&] { run(choice); });
}
