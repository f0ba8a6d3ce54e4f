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
#include <optional>

#include "benchmarks/harness/suite.h"
#include "benchmarks/kernels/adamw_bytes.h"
#include "kernels/backend.h"
#include "kernels/runtime/buffer.h"
#include "kernels/runtime/sizes.h"
#include "kernels/runtime/stream.h"
#include "optim/state_layout.h"
#include "optim/step.h"

namespace ballast::benchmarks {
namespace {

constexpr int issues_of_a_run = 4;
constexpr unsigned char byte_of_values = 0x3c;  // bf16 0x3c3c is 0.0115, and fp32 0x3c3c3c3c nearly the same

// The GPU that the cases run on, and its memory. Subjects issue their work several times and then wait for it, so that the wait is
// a small part of what is timed.
class TestedGpu {
 public:
  explicit TestedGpu(int gpu);  // throws B2101 or B2102 without a GPU

  kernels::Backend& backend() { return *backend_; }
  const Stream& stream() const { return stream_; }

  // Memory with plausible values: small ones, of one sign.
  std::shared_ptr<ballast::Buffer> device(std::size_t bytes);
  std::shared_ptr<ballast::Buffer> host(MemoryKind kind, std::size_t bytes);

  // A subject whose `issue` moves `bytes`, read and written together.
  Subject moving(std::size_t bytes, std::function<void()> issue) const;

 private:
  std::shared_ptr<ballast::Buffer> memory(MemoryKind kind, std::size_t bytes);

  int gpu_;
  MemoryAccounts accounts_;
  Stream stream_;
  std::unique_ptr<kernels::Backend> backend_;
};

TestedGpu::TestedGpu(int gpu) : gpu_(gpu), stream_(gpu), backend_(kernels::cuda_backend(stream_.handle(), gpu)) {}

std::shared_ptr<ballast::Buffer> TestedGpu::device(std::size_t bytes) {
  auto made = memory(MemoryKind::device, bytes);
  ballast::fill(made->data(), byte_of_values, bytes, stream_);
  stream_.synchronize();
  return made;
}

std::shared_ptr<ballast::Buffer> TestedGpu::host(MemoryKind kind, std::size_t bytes) {
  auto made = memory(kind, bytes);
  std::memset(made->data(), byte_of_values, bytes);
  return made;
}

std::shared_ptr<ballast::Buffer> TestedGpu::memory(MemoryKind kind, std::size_t bytes) {
  return std::make_shared<ballast::Buffer>(
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

// --- Kernels ---

using kernels::CodeBits;
using enum DType;

Subject copy_in_memory(TestedGpu& gpu, std::size_t elements) {
  const std::size_t bytes = elements * 8;
  const auto from = gpu.device(bytes), to = gpu.device(bytes);
  return gpu.moving(2 * bytes, [=, &gpu] { copy(to->data(), from->data(), bytes, gpu.stream()); });
}

// bf16 gradients and parameters and the state of one format, updated in tiles of `tile` elements.
Subject adamw_on(TestedGpu& gpu, StateFormat format, std::size_t elements, std::size_t tile) {
  const optim::StateLayout layout({.format = format, .parameter = bf16, .names = optim::AdamW::state}, tile);
  const std::size_t count = elements / tile;
  const auto gradient = gpu.device(count * tile * 2), parameter = gpu.device(count * tile * 2);
  const auto state = gpu.device(count * layout.bytes());
  const kernels::GroupStep group = optim::at(optim::AdamW{}, {.number = 1});
  const auto bytes = static_cast<std::size_t>(adamw_bytes_of_an_element(format) * static_cast<double>(count * tile));
  return gpu.moving(bytes, [=, &gpu] {
    for (std::size_t i = 0; i < count; ++i) {
      TileMemory memory = layout.tile(state->data() + i * layout.bytes());
      memory.parameter = parameter->data() + i * tile * 2;
      memory.gradient = gradient->data() + i * tile * 2;
      memory.count = tile;
      memory.first_index = i * tile;
      const kernels::Run run{.begin = 0, .count = tile, .group = 0};
      gpu.backend().update(memory, {&run, 1}, {&group, 1});
    }
  });
}

// An array on the GPU, seen as elements of a format.
struct Array {
  Array(TestedGpu& gpu, std::size_t count, DType dtype) : memory(gpu.device(count * byte_size(dtype))), format(dtype) {}
  View view() const { return memory->view(format); }
  std::size_t bytes() const { return memory->bytes(); }

  std::shared_ptr<ballast::Buffer> memory;
  DType format;
};

Subject cast_on(TestedGpu& gpu, std::size_t elements, DType from, DType to) {
  const Array source(gpu, elements, from), target(gpu, elements, to);
  return gpu.moving(source.bytes() + target.bytes(), [=, &gpu] { gpu.backend().cast(source.view(), target.view()); });
}

Subject accumulate_on(TestedGpu& gpu, std::size_t elements, DType from) {
  const Array source(gpu, elements, from), target(gpu, elements, fp32);
  return gpu.moving(source.bytes() + 2 * target.bytes(),
                    [=, &gpu] { gpu.backend().accumulate(source.view(), 0.5f, target.view()); });
}

Subject fill_on(TestedGpu& gpu, std::size_t elements) {
  const Array target(gpu, elements, fp32);
  return gpu.moving(target.bytes(), [=, &gpu] { gpu.backend().fill(target.view(), 0.0f); });
}

Subject sum_of_squares_on(TestedGpu& gpu, std::size_t elements, DType dtype) {
  const Array values(gpu, elements, dtype);
  const auto sum = gpu.device(sizeof(kernels::ExactSum));
  fill(sum->data(), 0, sum->bytes(), gpu.stream());
  auto* into = reinterpret_cast<kernels::ExactSum*>(sum->data());
  return gpu.moving(values.bytes(), [=, &gpu] {
    fill(sum->data(), 0, sum->bytes(), gpu.stream());
    gpu.backend().sum_of_squares(values.view(), into);
  });
}

Subject first_non_finite_on(TestedGpu& gpu, std::size_t elements) {
  const Array values(gpu, elements, bf16);
  const auto first = gpu.device(sizeof(std::uint64_t));
  return gpu.moving(values.bytes(), [=, &gpu] {
    fill(first->data(), 0xff, first->bytes(), gpu.stream());
    gpu.backend().first_non_finite(values.view(), 0, reinterpret_cast<std::uint64_t*>(first->data()));
  });
}

Subject quantize_on(TestedGpu& gpu, std::size_t elements, CodeBits bits) {
  const Array source(gpu, elements, bf16), blocks(gpu, kernels::quantized_bytes(elements, bits), u8);
  return gpu.moving(source.bytes() + blocks.bytes(), [=, &gpu] {
    gpu.backend().quantize(source.view(), {bits, blocks.view()}, {});
  });
}

// Pieces whose sizes differ like those of a model's tensors: a few large ones and many small ones.
Subject pack_on(TestedGpu& gpu, std::size_t elements, std::size_t count) {
  const Array source(gpu, elements, bf16), target(gpu, elements, bf16);
  std::vector<kernels::CopyPiece> pieces;
  std::size_t begin = 0;
  for (std::size_t i = 1; i <= count; ++i) {
    const std::size_t end = elements / (count * count) * i * i;
    pieces.push_back({source.view().part(begin, end - begin), target.view().part(begin, end - begin)});
    begin = end;
  }
  return gpu.moving(4 * begin, [=, &gpu] { gpu.backend().copy_pieces(pieces); });
}

// `elements` is the size of the large arrays, which must not fit the caches. The GPU is there when a case is made.
std::vector<Trial> kernel_cases(std::optional<TestedGpu>& gpu, std::size_t elements) {
  std::vector<Trial> all;
  const auto add = [&](std::string name, std::function<Subject(TestedGpu&)> make) {
    all.push_back({std::move(name), "copy", [=, &gpu] { return Pair{make(*gpu), copy_in_memory(*gpu, elements)}; }});
  };
  const std::array tiles = {std::pair{"whole", elements}, std::pair{"tiles of 4 Mi", std::size_t{4} << 20},
                            std::pair{"tiles of 256 Ki", std::size_t{256} << 10}};
  for (const StateFormat format : all_state_formats) {
    for (const auto& [name_of_tile, wanted] : tiles) {
      const std::size_t tile = std::min(wanted, elements);
      add(fmt::format("adamw {}, {}", name(format), name_of_tile),
          [=](TestedGpu& gpu) { return adamw_on(gpu, format, elements, tile); });
    }
  }
  add("cast fp32 to bf16", [=](TestedGpu& gpu) { return cast_on(gpu, elements, fp32, bf16); });
  add("cast bf16 to fp32", [=](TestedGpu& gpu) { return cast_on(gpu, elements, bf16, fp32); });
  add("accumulate bf16 into fp32", [=](TestedGpu& gpu) { return accumulate_on(gpu, elements, bf16); });
  add("fill fp32", [=](TestedGpu& gpu) { return fill_on(gpu, elements); });
  add("sum of squares of fp32", [=](TestedGpu& gpu) { return sum_of_squares_on(gpu, elements, fp32); });
  add("sum of squares of bf16", [=](TestedGpu& gpu) { return sum_of_squares_on(gpu, elements, bf16); });
  add("first non-finite of bf16", [=](TestedGpu& gpu) { return first_non_finite_on(gpu, elements); });
  add("quantize bf16 to 8 bits", [=](TestedGpu& gpu) { return quantize_on(gpu, elements, CodeBits::eight); });
  add("quantize bf16 to 4 bits", [=](TestedGpu& gpu) { return quantize_on(gpu, elements, CodeBits::four); });
  add("pack 300 pieces of bf16", [=](TestedGpu& gpu) { return pack_on(gpu, elements, 300); });
  return all;
}

// --- Transfers ---

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

std::vector<Trial> transfer_cases(std::optional<TestedGpu>& gpu, std::size_t bytes) {
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

struct Options {
  std::size_t elements = std::size_t{128} << 20;
  std::size_t bytes = std::size_t{512} << 20;
  int gpu = 0;
  Choice choice{};
};

void describe(CLI::App& app, Options& options) {
  app.add_option("--elements", options.elements, "Elements of the kernels' arrays (128 Mi)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::size_t{1} << 20, std::size_t{1} << 36));
  app.add_option("--bytes", options.bytes, "Bytes of a transfer (512 MiB)")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::size_t{1} << 20, std::size_t{1} << 36));
  app.add_option("--gpu", options.gpu, "GPU, by CUDA's number (0)");
  describe(app, options.choice);
}

void run(const Options& options) {
  std::optional<TestedGpu> gpu;
  std::vector<Trial> trials = kernel_cases(gpu, options.elements);
  std::ranges::move(transfer_cases(gpu, options.bytes), std::back_inserter(trials));
  if (!options.choice.list) gpu.emplace(options.gpu);
  run_trials("gpu", trials, options.choice);
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  using namespace ballast::benchmarks;
  CLI::App app{"Kernels on a GPU, compared with a copy in its memory; transfers, compared with a long one"};
  Options options;
  describe(app, options);
  return run_program(app, argc, argv, [&] { run(options); });
}
