// Measures CPU kernels, compared with what the memory allows. To add a case, add a line to one of the tables.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/harness/suite.h"
#include "benchmarks/kernels/elementwise.h"
#include "examples/llama/multiply.h"
#include "kernels/cpu.h"
#include "kernels/orthogonalize.h"

namespace ballast::benchmarks {
namespace {

// Compares a subject with a limit of the memory for the same bytes: "copy", "scale in place" or "read".
Trial versus_limit(const Setting& setting, std::string name, const std::string& limit, std::function<Subject()> make) {
  return {std::move(name), limit, [&setting, limit, make = std::move(make)] {
            const Subject subject = make();
            const auto bytes = static_cast<std::size_t>(subject.work * 1e9);
            const Limits& limits = *setting.limits;
            if (limit == "read") return Pair{subject, limits.read(bytes)};
            return Pair{subject, limit == "copy" ? limits.copy(setting.copy, bytes) : limits.scale(bytes)};
          }};
}

constexpr std::size_t cached_elements = 8 * 1024;  // 16 bytes each at most: an eighth of a common second-level cache

// The same arithmetic on as many elements, but each thread stays in its cache: the rate if memory cost nothing.
Subject adamw_from_cache(StateFormat format, const Setting& setting) {
  const auto threads = static_cast<std::size_t>(setting.threads->count());
  const auto one_thread = cpu_place(1);
  std::vector<Subject> subjects;
  for (std::size_t thread = 0; thread < threads; ++thread) {
    subjects.push_back(adamw(one_thread, format, cached_elements, cached_elements));
  }
  const std::size_t repeats = std::max<std::size_t>(1, setting.elements / (cached_elements * threads));
  const double work = subjects[0].work * static_cast<double>(repeats * threads);
  return {.work = work, .run = [=, &pool = *setting.threads] {
            pool.each(threads, [&](std::size_t thread) {
              for (std::size_t repeat = 0; repeat < repeats; ++repeat) {
                subjects[thread].run();
              }
            });
          }};
}

// The tables: a new case is a line in one of them.
void optimizer_steps(const Setting& setting, std::vector<Trial>& all) {
  for (const StateFormat format : all_state_formats) {
    const auto add = [&](const char* what, const char* limit, const std::function<Subject()>& make) {
      all.push_back(versus_limit(setting, fmt::format("adamw {}, {}", name(format), what), limit, make));
    };
    const auto from_memory = [&setting, format](std::size_t elements, std::size_t most_of_tile) {
      return adamw(cpu_place(setting.threads->count()), format, elements, most_of_tile);
    };
    const auto whole = [=, &setting] { return from_memory(setting.elements, setting.elements); };
    add("whole", "copy", whole);
    add("whole", "scale in place", whole);
    // Gradient, parameter, master and moments lie at distances that are powers of two. A memory controller may then send them all
    // to the same bank.
    add("2^n elements", "copy",
        [=, &setting] { return from_memory(std::bit_floor(setting.elements), std::bit_floor(setting.elements)); });
    add("tiles", "copy", [=, &setting] { return from_memory(setting.elements, 512 * 1024); });
    add("from cache", "copy", [=, &setting] { return adamw_from_cache(format, setting); });
  }
}

void elementwise(const Setting& setting, std::vector<Trial>& all) {
  for (const ElementwiseCase& item : elementwise_cases()) {
    all.push_back(versus_limit(setting, item.name, item.against, [&setting, make = item.make] {
      return make(cpu_place(setting.threads->count()), setting.elements);
    }));
  }
}

// --- Products of matrices in bf16 and Newton-Schulz iterations, on one thread. The GPT trainer's matrix library (oneDNN if it is
// installed) computes the same products. ---

// rows x inner x columns. A symmetric one is a matrix by its transpose, and counts the operations of both halves.
struct ProductSizes {
  std::size_t rows;
  std::size_t inner;
  std::size_t columns;
  bool symmetric = false;
};

constexpr std::size_t steps = 5;
constexpr float coefficients[] = {3.4445f, -4.7750f, 2.0315f};

// Values of both signs, near the size of those that are multiplied.
class Values {
 public:
  Values(std::size_t count, DType dtype = DType::bf16)
      : buffer_(count * byte_size(dtype)), view_(buffer_.data(), count, dtype) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(static_cast<int>(i * 7919 % 2001) - 1000) * 1e-4f;
    }
    kernels::cpu_backend({.threads = 1})->cast(ConstView(std::span<const float>(values)), view_);
  }

  const View& view() const { return view_; }
  std::uint16_t* halves() const { return reinterpret_cast<std::uint16_t*>(buffer_.data()); }

 private:
  Buffer buffer_;
  View view_;
};

double billions(const ProductSizes& sizes) {
  return 2e-9 * static_cast<double>(sizes.rows) * static_cast<double>(sizes.inner) * static_cast<double>(sizes.columns);
}

// The products of a step: of the wide matrix X, X X^T, its square, and that by X.
std::vector<ProductSizes> products_of(const kernels::MatrixShape& shape) {
  const std::size_t side = std::min(shape.rows, shape.columns);
  const std::size_t length = std::max(shape.rows, shape.columns);
  return {{side, length, side}, {side, side, side}, {side, side, length}};
}

double billions(const kernels::MatrixShape& shape) {
  double all = 0;
  for (const ProductSizes& sizes : products_of(shape)) {
    all += static_cast<double>(steps) * billions(sizes);
  }
  return all;
}

struct Factors {
  Factors(const ProductSizes& sizes, DType dtype)
      : left(sizes.rows * sizes.inner, dtype),
        right(sizes.inner * sizes.columns, dtype),
        to(sizes.rows * sizes.columns, dtype) {}

  Values left, right, to;
};

Subject product(const ProductSizes& sizes) {
  const auto parts = std::make_shared<Factors>(sizes, DType::bf16);
  const kernels::Factor left{parts->left.halves(), sizes.inner, 1};
  const kernels::Factor right{parts->right.halves(), sizes.columns, 1};
  const kernels::Product task{.rows = sizes.rows,
                              .inner = sizes.inner,
                              .columns = sizes.columns,
                              .left = left,
                              .right = sizes.symmetric ? transposed(left) : right,
                              .to = parts->to.halves(),
                              .symmetric = sizes.symmetric};
  const auto memory = std::make_shared<std::vector<kernels::BlockMemory>>(1);
  const kernels::Cpu cpu = kernels::cpu_of({.threads = 1});
  return {.work = billions(sizes), .run = [=, kept = parts] { kernels::multiply(cpu, task, *memory); }};
}

Subject product_by_library(const ProductSizes& sizes, DType dtype) {
  const auto parts = std::make_shared<Factors>(sizes, dtype);
  const auto run = [parts, sizes] {
    const llama::ConstMatrix left(parts->left.view(), sizes.inner), right(parts->right.view(), sizes.columns);
    llama::multiply_on_this_thread({.a = left,
                                    .b = sizes.symmetric ? left.transpose() : right,
                                    .to = llama::Matrix(parts->to.view(), sizes.columns)});
  };
  return {.work = billions(sizes), .run = run};
}

// Five steps.
Subject orthogonalization(const kernels::MatrixShape& shape) {
  struct Parts {
    explicit Parts(const kernels::MatrixShape& shape)
        : on(kernels::cpu_orthogonalizer({.threads = 1})),
          matrices(shape.elements()),
          workspace(on->workspace_bytes(shape)) {}

    std::unique_ptr<kernels::Orthogonalizer> on;
    Values matrices;
    Buffer workspace;  // whole pages
  };
  const auto parts = std::make_shared<Parts>(shape);
  const auto run = [parts, shape] {
    const kernels::Quintic step{coefficients[0], coefficients[1], coefficients[2]};
    (*parts->on)(parts->matrices.view(), shape, {.steps = std::vector(steps, step)},
                 {parts->workspace.data(), parts->workspace.bytes(), DType::u8});
  };
  return {.work = billions(shape), .run = run};
}

// The products of five steps alone, both halves of each.
Subject orthogonalization_by_library(const kernels::MatrixShape& shape) {
  std::vector<std::function<void()>> products;
  for (const ProductSizes& sizes : products_of(shape)) {
    products.push_back(product_by_library(sizes, DType::bf16).run);
  }
  const auto run = [products] {
    for (std::size_t step = 0; step < steps; ++step) {
      for (const auto& product : products) {
        product();
      }
    }
  };
  return {.work = billions(shape), .run = run};
}

void versus_library(std::vector<Trial>& all, const std::string& name, const ProductSizes& sizes) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    all.push_back({name, fmt::format("library, {}", ballast::name(dtype)),
                   [=] {
                     return Pair{product(sizes), product_by_library(sizes, dtype)};
                   },
                   "GFLOP/s"});
  }
}

void matrices(std::vector<Trial>& all) {
  versus_library(all, "multiply 1024 x 1024 x 1024", {1024, 1024, 1024});
  versus_library(all, "multiply by the transpose, 1024 x 1024", {1024, 1024, 1024, true});
  for (const kernels::MatrixShape shape : {kernels::MatrixShape{1024, 1024}, kernels::MatrixShape{1024, 4096}}) {
    all.push_back({fmt::format("orthogonalize {} x {}", shape.rows, shape.columns), "library, bf16",
                   [=] {
                     return Pair{orthogonalization(shape), orthogonalization_by_library(shape)};
                   },
                   "GFLOP/s"});
  }
}

// --- The suite ---

std::vector<Trial> trials(const Setting& setting) {
  std::vector<Trial> all;
  optimizer_steps(setting, all);
  elementwise(setting, all);
  matrices(all);
  return all;
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  return ballast::benchmarks::run_suite({.name = "kernels",
                                         .description = "CPU kernels, compared with what the memory allows",
                                         .most_bytes_of_an_element = 28,
                                         .trials = ballast::benchmarks::trials},
                                        argc, argv);
}
