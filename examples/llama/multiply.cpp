#include "examples/llama/multiply.h"

#include <algorithm>
#include <array>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

// The OpenMP library that oneDNN links has this function; it is null if oneDNN links none.
extern "C" [[gnu::weak]] void omp_set_num_threads(int count);

namespace ballast::llama {
namespace {

using dnnl::matmul;
using dnnl::memory;

// The depth of the factors that is widened at a time, so that the memory of a thread does not grow with the model.
constexpr std::size_t depth_at_once = 1024;

dnnl::engine& cpu() {
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

bool has_bf16() {
  static const bool has = dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core_bf16;
  return has;
}

template <class AnyMatrix>
memory::desc describe(const AnyMatrix& m) {
  const auto number = [](std::size_t count) { return static_cast<memory::dim>(count); };
  const auto type = m.memory.dtype() == DType::fp32 ? memory::data_type::f32 : memory::data_type::bf16;
  return {{number(m.rows), number(m.columns)}, type, memory::dims{number(m.row_step()), number(m.column_step())}};
}

// oneDNN 2 describes a product by a descriptor, oneDNN 3 has no descriptors.
template <class Matmul = matmul, class Description = typename Matmul::primitive_desc>
Description describe(const Product& p) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);  // oneDNN's own keeps more memory for each thread
  dnnl::post_ops sum;
  if (p.add) sum.append_sum(1.0f);
  attributes.set_post_ops(sum);
  const memory::desc a = describe(p.a), b = describe(p.b), to = describe(p.to);
  if constexpr (requires { Description(cpu(), a, b, to, attributes); }) {
    return Description(cpu(), a, b, to, attributes);
  } else {
    return Description(typename Matmul::desc(a, b, to), attributes, cpu());
  }
}

// A product that oneDNN has compiled for its shape.
struct Compiled {
  explicit Compiled(const matmul::primitive_desc& description)
      : multiply(description), scratch(description.scratchpad_desc()) {}

  matmul multiply;
  memory::desc scratch;
};

void run(const Product& p) {
  if (omp_set_num_threads != nullptr) omp_set_num_threads(1);  // sets it for the calling thread only
  using Key = std::array<std::size_t, 11>;
  thread_local std::map<Key, Compiled> all;
  const auto type = [](const auto& m) { return static_cast<std::size_t>(m.memory.dtype()); };
  const Key key{p.to.rows,      p.to.columns, p.a.columns, p.a.stride, p.a.transposed, p.b.stride,
                p.b.transposed, p.to.stride,  type(p.a),   type(p.to), p.add};
  auto found = all.find(key);
  if (found == all.end()) found = all.emplace(key, describe(p)).first;
  const Compiled& compiled = found->second;
  const auto at = [](const auto& m) { return memory(describe(m), cpu(), const_cast<std::byte*>(m.memory.data())); };
  std::vector<std::byte> scratch(compiled.scratch.get_size());
  dnnl::stream stream(cpu());
  compiled.multiply.execute(stream, {{DNNL_ARG_SRC, at(p.a)},
                                     {DNNL_ARG_WEIGHTS, at(p.b)},
                                     {DNNL_ARG_DST, at(p.to)},
                                     {DNNL_ARG_SCRATCHPAD, memory(compiled.scratch, cpu(), scratch.data())}});
  stream.wait();
}

// The values of a matrix in fp32, in the order of its memory and without gaps.
ConstMatrix widen(const ConstMatrix& from, std::vector<float>& values) {
  const std::size_t width = from.transposed ? from.rows : from.columns;
  values.resize(from.rows * from.columns);
  for (std::size_t row = 0; row < values.size() / width; ++row) {
    rows::read(from.memory, row * from.stride, rows::Row(values).subspan(row * width, width));
  }
  ConstMatrix to(ConstView(std::span<const float>(values)), width);
  return from.transposed ? to.transpose() : to;
}

// Multiplies in fp32, on processors without bf16 arithmetic.
void run_widened(const Product& p) {
  std::vector<float> a, b, result(p.to.rows * p.to.columns);
  for (std::size_t first = 0; first < p.a.columns; first += depth_at_once) {
    const std::size_t depth = std::min(depth_at_once, p.a.columns - first);
    run({.a = widen(p.a.part(0, p.to.rows, first, depth), a),
         .b = widen(p.b.part(first, depth, 0, p.to.columns), b),
         .to = Matrix(View(std::span(result)), p.to.columns),
         .add = first > 0});
  }
  for (std::size_t i = 0; i < p.to.rows; ++i) {
    const auto row = rows::Row(result).subspan(i * p.to.columns, p.to.columns);
    p.add ? rows::add_to(p.to.memory, i * p.to.stride, row) : rows::write(row, p.to.memory, i * p.to.stride);
  }
}

}  // namespace

std::string multiplier_name() {
  const dnnl_version_t& version = *dnnl::version();
  return "oneDNN " + std::to_string(version.major) + "." + std::to_string(version.minor) + "." +
         std::to_string(version.patch);
}

void multiply_on_this_thread(const Product& product) {
  const bool is_bf16 = product.a.memory.dtype() == DType::bf16;
  is_bf16 && !has_bf16() ? run_widened(product) : run(product);
}

}  // namespace ballast::llama
