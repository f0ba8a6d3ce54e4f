#include "benchmarks/kernels/elementwise.h"

#include <cstring>

#include "benchmarks/harness/buffer.h"

namespace ballast::benchmarks {
namespace {

using kernels::CodeBits;

class Cpu : public Place {
 public:
  explicit Cpu(int threads) : backend_(kernels::cpu_backend({.threads = threads})) {}

  kernels::Backend& backend() override { return *backend_; }
  std::shared_ptr<std::byte> memory(std::size_t bytes) override {
    const auto made = std::make_shared<Buffer>(bytes);
    std::memset(made->data(), byte_of_values, bytes);
    return {made, made->data()};
  }
  void set(std::byte* memory, unsigned char byte, std::size_t bytes) override { std::memset(memory, byte, bytes); }
  Subject moving(std::size_t bytes, std::function<void()> issue) const override {
    return {.work = static_cast<double>(bytes) / 1e9, .run = std::move(issue)};
  }

 private:
  std::unique_ptr<kernels::Backend> backend_;
};

struct Bench {
  kernels::Backend& backend() const { return place->backend(); }

  std::shared_ptr<Place> place;
  std::size_t elements;
};

// Memory that is seen as elements of a format.
class Array {
 public:
  Array(const Bench& bench, DType dtype) : Array(bench, dtype, bench.elements) {}
  Array(const Bench& bench, DType dtype, std::size_t count)
      : memory_(bench.place->memory(count * byte_size(dtype))), count_(count), dtype_(dtype) {}

  View view() const { return {memory_.get(), count_, dtype_}; }
  std::size_t bytes() const { return count_ * byte_size(dtype_); }

 private:
  std::shared_ptr<std::byte> memory_;
  std::size_t count_;
  DType dtype_;
};

Array codes(const Bench& on, CodeBits bits) { return {on, DType::u8, kernels::quantized_bytes(on.elements, bits)}; }

Subject cast(const Bench& on, DType from, DType to) {
  const Array source(on, from), target(on, to);
  return on.place->moving(source.bytes() + target.bytes(), [=] { on.backend().cast(source.view(), target.view()); });
}

Subject accumulate(const Bench& on, DType from, DType into) {
  const Array source(on, from), target(on, into);
  return on.place->moving(source.bytes() + 2 * target.bytes(),
                          [=] { on.backend().accumulate(source.view(), target.view()); });
}

Subject clear(const Bench& on, DType dtype) {
  const Array target(on, dtype);
  return on.place->moving(target.bytes(), [=] { on.backend().clear(target.view()); });
}

Subject sum_of_squares(const Bench& on, DType dtype) {
  const Array values(on, dtype);
  const auto sum = on.place->memory(sizeof(kernels::ExactSum));
  return on.place->moving(values.bytes(), [=] {
    on.place->set(sum.get(), 0, sizeof(kernels::ExactSum));
    on.backend().sum_of_squares(values.view(), reinterpret_cast<kernels::ExactSum*>(sum.get()));
  });
}

Subject first_non_finite(const Bench& on, DType dtype) {
  const Array values(on, dtype);
  const auto first = on.place->memory(sizeof(std::uint64_t));
  return on.place->moving(values.bytes(), [=] {
    on.place->set(first.get(), 0xff, sizeof(std::uint64_t));
    on.backend().first_non_finite(values.view(), 0, reinterpret_cast<std::uint64_t*>(first.get()));
  });
}

Subject quantize(const Bench& on, DType from, CodeBits bits) {
  const Array source(on, from), blocks = codes(on, bits);
  return on.place->moving(source.bytes() + blocks.bytes(), [=] {
    on.backend().quantize(source.view(), {bits, blocks.view()}, {});
  });
}

Subject dequantize(const Bench& on, CodeBits bits, DType to) {
  const Array blocks = codes(on, bits), target(on, to);
  on.backend().quantize(target.view(), {bits, blocks.view()}, {});
  return on.place->moving(blocks.bytes() + target.bytes(), [=] {
    on.backend().dequantize({bits, blocks.view()}, target.view());
  });
}

}  // namespace

std::shared_ptr<Place> cpu_place(int threads) { return std::make_shared<Cpu>(threads); }

std::vector<ElementwiseCase> elementwise_cases() {
  using enum DType;
  std::vector<ElementwiseCase> all;
  const auto add = [&](std::string name, std::string against, auto make, auto... formats) {
    all.push_back({std::move(name), std::move(against), [=](const std::shared_ptr<Place>& place, std::size_t elements) {
                     return make(Bench{place, elements}, formats...);
                   }});
  };
  add("cast fp32 to bf16", "copy", cast, fp32, bf16);
  add("cast bf16 to fp32", "copy", cast, bf16, fp32);
  add("cast fp32 to fp16", "copy", cast, fp32, fp16);
  add("accumulate bf16 into fp32", "copy", accumulate, bf16, fp32);
  add("accumulate bf16 into bf16", "copy", accumulate, bf16, bf16);
  add("clear fp32", "copy", clear, fp32);
  add("sum of squares of fp32", "read", sum_of_squares, fp32);
  add("sum of squares of bf16", "read", sum_of_squares, bf16);
  add("first non-finite of bf16", "read", first_non_finite, bf16);
  add("quantize bf16 to 8 bits", "copy", quantize, bf16, CodeBits::eight);
  add("quantize bf16 to 4 bits", "copy", quantize, bf16, CodeBits::four);
  add("dequantize 8 bits to bf16", "copy", dequantize, CodeBits::eight, bf16);
  return all;
}

}  // namespace ballast::benchmarks
