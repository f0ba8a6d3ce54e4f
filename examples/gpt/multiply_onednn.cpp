#include <fmt/format.h>

#include <array>
#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <optional>
#include <unordered_map>
#include <vector>

#include "examples/gpt/multiply.h"

// The OpenMP library that oneDNN links has this function; it is null if oneDNN links none.
extern "C" [[gnu::weak]] void omp_set_num_threads(int count);

namespace ballast::gpt {
namespace {

using dnnl::matmul;
using dnnl::memory;

// The properties on which a compiled product depends.
using Key = std::array<std::size_t, 12>;

Key key_of(const Product& p) {
  const auto number_of = [](DType dtype) { return static_cast<std::size_t>(dtype); };
  return {p.to.rows,
          p.to.columns,
          p.a.columns,
          p.a.stride,
          p.a.transposed,
          p.b.stride,
          p.b.transposed,
          p.to.stride,
          number_of(p.a.dtype()),
          number_of(p.to.dtype()),
          p.add,
          p.bias.count() > 0};
}

memory::data_type type_of(DType dtype) {
  return dtype == DType::fp32 ? memory::data_type::f32 : memory::data_type::bf16;
}

template <class AnyMatrix>
memory::desc describe(const AnyMatrix& matrix) {
  const auto number_of = [](std::size_t count) { return static_cast<memory::dim>(count); };
  return {{number_of(matrix.rows), number_of(matrix.columns)},
          type_of(matrix.dtype()),
          memory::dims{number_of(matrix.row_step()), number_of(matrix.column_step())}};
}

memory::desc describe_bias(const Product& product) {
  if (product.bias.count() == 0) return {};
  const auto columns = static_cast<memory::dim>(product.bias.count());
  return {{1, columns}, type_of(product.bias.dtype()), memory::dims{columns, 1}};
}

dnnl::primitive_attr attributes(const Product& product) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);  // threads do not share it then
  if (product.add) {
    dnnl::post_ops add;
    add.append_sum(1.0f);
    attributes.set_post_ops(add);
  }
  return attributes;
}

// oneDNN 2 describes a product by a descriptor, oneDNN 3 has no descriptors.
template <class Matmul = matmul, class Description = typename Matmul::primitive_desc>
Description describe(const Product& p, const dnnl::engine& engine) {
  const memory::desc a = describe(p.a), b = describe(p.b), bias = describe_bias(p), to = describe(p.to);
  if constexpr (requires { Description(engine, a, b, bias, to, attributes(p)); }) {
    return Description(engine, a, b, bias, to, attributes(p));
  } else {
    return Description(typename Matmul::desc(a, b, bias, to), attributes(p), engine);
  }
}

struct Compiled {
  matmul::primitive_desc description;
  matmul run;
};

}  // namespace

struct Multiplier::Parts {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  std::mutex mutex;
  std::map<Key, std::optional<Compiled>> compiled;  // empty: oneDNN has no fast implementation
  std::vector<std::vector<std::byte>> scratch;      // currently unused

  const std::optional<Compiled>& of(const Product& product) {
    const std::lock_guard lock(mutex);
    const auto [entry, is_new] = compiled.try_emplace(key_of(product));
    if (is_new) entry->second = compile(product);
    return entry->second;
  }

  // oneDNN has no implementation, or only its slow reference, on a CPU without bf16 arithmetic.
  std::optional<Compiled> compile(const Product& product) const {
    try {
      const matmul::primitive_desc description = describe(product, engine);
      if (std::string_view(description.impl_info_str()).starts_with("ref")) return {};
      return Compiled{description, matmul(description)};
    } catch (const dnnl::error& error) {
      if (error.status == dnnl_unimplemented) return {};
      throw;
    }
  }

  std::vector<std::byte> take_scratch(std::size_t bytes) {
    std::vector<std::byte> taken;
    const std::lock_guard lock(mutex);
    if (!scratch.empty()) {
      taken = std::move(scratch.back());
      scratch.pop_back();
    }
    if (taken.size() < bytes) taken.resize(bytes);
    return taken;
  }

  void give_back(std::vector<std::byte> taken) {
    const std::lock_guard lock(mutex);
    scratch.push_back(std::move(taken));
  }
};

Multiplier::Multiplier() : parts_(new Parts) {}

Multiplier::~Multiplier() = default;

std::string Multiplier::library() const {
  const dnnl_version_t& version = *dnnl::version();
  return fmt::format("oneDNN {}.{}.{}", version.major, version.minor, version.patch);
}

void Multiplier::operator()(const Product& product) const {
  if (omp_set_num_threads != nullptr) omp_set_num_threads(1);  // sets it for the calling thread only
  const std::optional<Compiled>& compiled = parts_->of(product);
  if (!compiled) {
    return product.a.dtype() == DType::fp32 ? multiply_portable(product) : multiply_widened(product, std::cref(*this));
  }
  const auto at = [&](const memory::desc& description, const std::byte* data) {
    return memory(description, parts_->engine, const_cast<std::byte*>(data));
  };
  const matmul::primitive_desc& description = compiled->description;
  std::vector<std::byte> scratch = parts_->take_scratch(description.scratchpad_desc().get_size());
  std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, at(description.src_desc(), product.a.data())},
                                            {DNNL_ARG_WEIGHTS, at(description.weights_desc(), product.b.data())},
                                            {DNNL_ARG_DST, at(description.dst_desc(), product.to.data())},
                                            {DNNL_ARG_SCRATCHPAD, at(description.scratchpad_desc(), scratch.data())}};
  if (product.bias.count() > 0) arguments.insert({DNNL_ARG_BIAS, at(description.bias_desc(), product.bias.data())});
  dnnl::stream stream(parts_->engine);
  compiled->run.execute(stream, arguments);
  stream.wait();
  parts_->give_back(std::move(scratch));
}

}  // namespace ballast::gpt
