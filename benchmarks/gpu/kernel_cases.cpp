#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "benchmarks/gpu/cases.h"
#include "benchmarks/kernels/adamw_bytes.h"
#include "optim/state_layout.h"
#include "optim/step.h"

namespace ballast::benchmarks {
namespace {

using Make = std::function<Subject(TestedGpu&)>;
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

  std::shared_ptr<Buffer> memory;
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

}  // namespace

std::vector<GpuCase> kernel_cases(std::size_t elements) {
  std::vector<GpuCase> all;
  const auto add = [&](std::string name, Make make) {
    all.push_back(
        {std::move(name), "copy", std::move(make), [=](TestedGpu& gpu) { return copy_in_memory(gpu, elements); }});
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

}  // namespace ballast::benchmarks
