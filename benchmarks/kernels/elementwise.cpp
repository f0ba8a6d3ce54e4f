#include <algorithm>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/kernels/subjects.h"

namespace ballast::benchmarks {
namespace {

// A buffer, filled with a value that every format represents.
class Array {
 public:
  Array(std::size_t count, DType dtype) : buffer_(count * byte_size(dtype)), count_(count), dtype_(dtype) {}

  Array(std::size_t count, DType dtype, kernels::Backend& backend) : Array(count, dtype) {
    backend.fill(view(), 0.375f);
  }

  View view() const { return {buffer_.data(), count_, dtype_}; }
  std::size_t bytes() const { return buffer_.bytes(); }

 private:
  Buffer buffer_;
  std::size_t count_;
  DType dtype_;
};

struct Bench {
  explicit Bench(const Setting& setting)
      : backend(kernels::cpu_backend({.threads = setting.threads.count()})), elements(setting.elements) {}

  std::shared_ptr<Array> array(DType dtype) const { return std::make_shared<Array>(elements, dtype, *backend); }

  std::shared_ptr<kernels::Backend> backend;
  std::size_t elements;
};

Subject moving(std::size_t bytes, std::function<void()> run) {
  return {.work = static_cast<double>(bytes) / 1e9, .run = std::move(run)};
}

// Returns ends of pieces whose sizes differ like those of a model's tensors: a few large ones and many small ones.
std::vector<std::size_t> cuts(std::size_t count, std::size_t pieces) {
  std::vector<std::size_t> ends;
  const double last = static_cast<double>(pieces) * static_cast<double>(pieces);
  for (std::size_t i = 1; i < pieces; ++i) {
    ends.push_back(static_cast<std::size_t>(static_cast<double>(count) * static_cast<double>(i * i) / last));
  }
  ends.push_back(count);
  return ends;
}

struct Packing {
  Packing(const Bench& bench, std::size_t count) : source(bench.array(DType::bf16)), target(bench.array(DType::bf16)) {
    std::size_t begin = 0;
    for (const std::size_t end : cuts(bench.elements, count)) {
      pieces.push_back({source->view().part(begin, end - begin), target->view().part(begin, end - begin)});
      begin = end;
    }
  }

  std::shared_ptr<Array> source;
  std::shared_ptr<Array> target;
  std::vector<kernels::CopyPiece> pieces{};
};

struct Codes {
  Codes(std::size_t count, kernels::CodeBits code_bits)
      : bits(code_bits), blocks(kernels::quantized_bytes(count, bits), DType::u8) {}

  kernels::Quantized quantized() const { return {bits, blocks.view()}; }
  kernels::ConstQuantized constant() const { return {bits, blocks.view()}; }
  std::size_t bytes() const { return blocks.bytes(); }

  kernels::CodeBits bits;
  Array blocks;
};

}  // namespace

Subject cast(DType from, DType to, const Setting& setting) {
  const Bench bench(setting);
  const auto source = bench.array(from);
  const auto target = bench.array(to);
  return moving(source->bytes() + target->bytes(), [=] { bench.backend->cast(source->view(), target->view()); });
}

Subject accumulate(DType from, DType into, const Setting& setting) {
  const Bench bench(setting);
  const auto source = bench.array(from);
  const auto target = bench.array(into);
  return moving(source->bytes() + 2 * target->bytes(),
                [=] { bench.backend->accumulate(source->view(), 0.5f, target->view()); });
}

Subject fill(DType dtype, const Setting& setting) {
  const Bench bench(setting);
  const auto target = bench.array(dtype);
  return moving(target->bytes(), [=] { bench.backend->fill(target->view(), 0.0f); });
}

Subject pack(std::size_t pieces, const Setting& setting) {
  const Bench bench(setting);
  const auto packing = std::make_shared<Packing>(bench, pieces);
  return moving(packing->source->bytes() + packing->target->bytes(),
                [=] { bench.backend->copy_pieces(packing->pieces); });
}

Subject sum_of_squares(DType dtype, const Setting& setting) {
  const Bench bench(setting);
  const auto values = bench.array(dtype);
  return moving(values->bytes(), [=] {
    kernels::ExactSum sum{};
    bench.backend->sum_of_squares(values->view(), &sum);
  });
}

Subject first_non_finite(DType dtype, const Setting& setting) {
  const Bench bench(setting);
  const auto values = bench.array(dtype);
  return moving(values->bytes(), [=] {
    std::uint64_t first = kernels::no_index;
    bench.backend->first_non_finite(values->view(), 0, &first);
  });
}

Subject quantize(DType from, kernels::CodeBits bits, const Setting& setting) {
  const Bench bench(setting);
  const auto source = bench.array(from);
  const auto codes = std::make_shared<Codes>(bench.elements, bits);
  return moving(source->bytes() + codes->bytes(),
                [=] { bench.backend->quantize(source->view(), codes->quantized(), {}); });
}

Subject dequantize(kernels::CodeBits bits, DType to, const Setting& setting) {
  const Bench bench(setting);
  const auto codes = std::make_shared<Codes>(bench.elements, bits);
  const auto target = bench.array(to);
  bench.backend->quantize(target->view(), codes->quantized(), {});
  return moving(codes->bytes() + target->bytes(),
                [=] { bench.backend->dequantize(codes->constant(), target->view()); });
}

}  // namespace ballast::benchmarks
