// The arithmetic on GPUs: products by cuBLAS, and kernels. It needs CUDA, cuBLAS and Ballast's public headers only. Sums are made in
// fp32 and in one order, without atomics, so equal calls give equal bits.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cfloat>
#include <vector>

#include "examples/llama/attention_cuda.cuh"
#include "examples/llama/maths.h"

namespace ballast::llama {
namespace {

// --- Elements of views ---

constexpr unsigned packed = 8;  // elements that a thread takes at once, in 16 or 32 bytes

template <class Byte>
struct Elements {
  Byte* data;
  std::size_t count;
  DType dtype;
};
using In = Elements<const std::byte>;
using Out = Elements<std::byte>;

template <unsigned count = packed, class Byte>
__device__ Pack<count> load(const Elements<Byte>& from, std::size_t i) {
  if (from.dtype == DType::fp32) return load<count>(reinterpret_cast<const float*>(from.data) + i);
  return load<count>(reinterpret_cast<const bf16*>(from.data) + i);
}

template <unsigned count>
__device__ void store(const Pack<count>& values, const Out& to, std::size_t i) {
  if (to.dtype == DType::fp32) return store(values, reinterpret_cast<float*>(to.data) + i);
  store(values, reinterpret_cast<bf16*>(to.data) + i);
}

template <unsigned count>
__device__ void add(Pack<count> values, const Out& to, std::size_t i) {
  values += load<count>(to, i);
  store(values, to, i);
}

// Calls body(i) for the first of each `at_once` elements; neighbouring threads take neighbouring ones.
template <unsigned at_once = packed, class Body>
__device__ void each_element(std::size_t count, Body body) {
  each_row(count / at_once, 1, [&](std::size_t i, unsigned) { body(i * at_once); });
}
constexpr std::size_t blocks_of(std::size_t elements) { return divide_up(elements, threads * packed); }

// --- Embeddings ---

__global__ void embed_kernel(Tokens tokens, In table, Out to) {
  const std::size_t width = to.count / tokens.count;
  each_element(to.count, [&](std::size_t i) { store(load(table, tokens.ids[i / width] * width + i % width), to, i); });
}

// The block for the first place of an id adds the rows of all its places, in order, so no two blocks write the same row.
__global__ void embed_backward_kernel(Tokens tokens, In gradient, Out table) {
  const std::size_t width = gradient.count / tokens.count, across = divide_up(width, threads * packed);
  const auto id = [&](std::size_t place) { return tokens.ids[tokens.order[place]]; };
  each_piece(tokens.count * across, [&](std::size_t piece) {
    const std::size_t first = piece / across, column = (piece % across * threads + threadIdx.x) * packed;
    if (column >= width || (first > 0 && id(first - 1) == id(first))) return;
    std::size_t last = first, above = tokens.count;
    while (above - last > 1) {
      const std::size_t middle = (last + above) / 2;
      (id(middle) == id(first) ? last : above) = middle;
    }
    Pack<packed> sum{};
#pragma unroll 4
    for (std::size_t place = first; place <= last; ++place)
      sum += load(gradient, tokens.order[place] * width + column);
    add(sum, table, id(first) * width + column);
  });
}

// --- Norms, rotations, activations ---

// A norm, and how its rows are shared among threads.
struct NormRows {
  In x;
  In weight;
  float epsilon;

  constexpr std::size_t width() const { return weight.count; }
  constexpr std::size_t rows() const { return x.count / weight.count; }
  constexpr unsigned team() const { return width() <= 1024 ? warp : threads; }
  constexpr std::size_t teams(std::size_t blocks) const { return blocks * (threads / team()); }
  constexpr std::size_t blocks() const { return divide_up(rows(), threads / team()); }
  __device__ float factor(float squares) const { return 1.0f / sqrtf(squares / static_cast<float>(width()) + epsilon); }
};

__global__ void rms_norm_kernel(NormRows norm, Out to) {
  each_row(norm.rows(), norm.team(), [&](std::size_t row, unsigned place) {
    const std::size_t first = row * norm.width();
    float squares = 0;
    for (std::size_t i = place * packed; i < norm.width(); i += norm.team() * packed) {
      for (const float x : load(norm.x, first + i).at)
        squares += x * x;
    }
    const float factor = norm.factor(sum_of_team(squares, norm.team()));
    for (std::size_t i = place * packed; i < norm.width(); i += norm.team() * packed) {
      Pack<packed> y = load(norm.x, first + i);
      const Pack<packed> weight = load(norm.weight, i);
      for (unsigned j = 0; j < packed; ++j)
        y.at[j] *= factor * weight.at[j];
      store(y, to, first + i);
    }
  });
}

// Each team sums the gradient of the weight over its rows.
__global__ void rms_norm_backward_kernel(NormRows norm, In gradient, float* sums, Out to, bool adds) {
  const std::size_t teams = norm.teams(gridDim.x);
  each_row(norm.rows(), norm.team(), [&](std::size_t row, unsigned place) {
    const std::size_t first = row * norm.width(), step = norm.team() * packed;
    float squares = 0, along = 0;
    for (std::size_t i = place * packed; i < norm.width(); i += step) {
      const Pack<packed> x = load(norm.x, first + i), weight = load(norm.weight, i), slope = load(gradient, first + i);
      for (unsigned j = 0; j < packed; ++j) {
        squares += x.at[j] * x.at[j];
        along += slope.at[j] * weight.at[j] * x.at[j];
      }
    }
    const float factor = norm.factor(sum_of_team(squares, norm.team()));
    const float share = sum_of_team(along, norm.team()) * factor * factor / static_cast<float>(norm.width());
    float* const own = sums + row % teams * norm.width();
    for (std::size_t i = place * packed; i < norm.width(); i += step) {
      const Pack<packed> x = load(norm.x, first + i), weight = load(norm.weight, i);
      Pack<packed> slope = load(gradient, first + i), sum = row < teams ? Pack<packed>{} : load<packed>(own + i);
      for (unsigned j = 0; j < packed; ++j) {
        sum.at[j] += slope.at[j] * x.at[j] * factor;
        slope.at[j] = factor * (slope.at[j] * weight.at[j] - share * x.at[j]);
      }
      store(sum, own + i);
      adds ? add(slope, to, first + i) : store(slope, to, first + i);
    }
  });
}

// Adds the sum of some rows.
__global__ void add_rows_kernel(const float* from, std::size_t rows, Out to) {
  each_row(to.count, warp, [&](std::size_t column, unsigned place) {
    float sum = 0;
    for (std::size_t row = place; row < rows; row += warp)
      sum += from[row * to.count + column];
    sum = sum_of_team(sum, warp);
    if (place == 0) add(Pack<1>{sum}, to, column);
  });
}

// Angles have a row for each position, with the cosines of a head's pairs and then their sines.
__global__ void rotate_kernel(Out x, std::size_t head_width, In angles, std::size_t row_width, float sign) {
  constexpr unsigned at_once = packed / 2;
  const std::size_t half = head_width / 2;
  each_element<at_once>(x.count / 2, [&](std::size_t i) {
    const std::size_t pair = i % half, low = i / half * head_width + pair;
    const std::size_t angle = low / row_width * head_width % angles.count + pair;
    const Pack<at_once> a = load<at_once>(x, low), b = load<at_once>(x, low + half);
    const Pack<at_once> cosine = load<at_once>(angles, angle), sine = load<at_once>(angles, angle + half);
    Pack<at_once> to_a, to_b;
    for (unsigned j = 0; j < at_once; ++j) {
      to_a.at[j] = a.at[j] * cosine.at[j] - b.at[j] * sign * sine.at[j];
      to_b.at[j] = b.at[j] * cosine.at[j] + a.at[j] * sign * sine.at[j];
    }
    store(to_a, x, low);
    store(to_b, x, low + half);
  });
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__global__ void swiglu_kernel(In gate, In up, Out to) {
  each_element(to.count, [&](std::size_t i) {
    Pack<packed> y = load(gate, i);
    const Pack<packed> times = load(up, i);
    for (unsigned j = 0; j < packed; ++j)
      y.at[j] *= sigmoid(y.at[j]) * times.at[j];
    store(y, to, i);
  });
}

__global__ void swiglu_backward_kernel(In gate, In up, Out gradient, Out up_gradient) {
  each_element(gradient.count, [&](std::size_t i) {
    const Pack<packed> gates = load(gate, i), ups = load(up, i);
    Pack<packed> slopes = load(gradient, i), of_up;
    for (unsigned j = 0; j < packed; ++j) {
      const float open = sigmoid(gates.at[j]);
      of_up.at[j] = slopes.at[j] * gates.at[j] * open;
      slopes.at[j] *= ups.at[j] * (open + gates.at[j] * open * (1.0f - open));
    }
    store(slopes, gradient, i);
    store(of_up, up_gradient, i);
  });
}

// Sums output * gradient over each row of each head: [sequence][head][position].
__global__ void along_kernel(AttentionMemory m, In output, In gradient, float* along) {
  each_row(output.count / m.head_width, warp, [&](std::size_t row, unsigned place) {
    float sum = 0;
    for (std::size_t i = place * packed; i < m.head_width; i += warp * packed) {
      const Pack<packed> y = load(output, row * m.head_width + i), slope = load(gradient, row * m.head_width + i);
      for (unsigned j = 0; j < packed; ++j)
        sum += y.at[j] * slope.at[j];
    }
    sum = sum_of_team(sum, warp);
    const std::size_t position = row / m.heads, head = position / m.context * m.heads + row % m.heads;
    if (place == 0) along[head * m.context + position % m.context] = sum;
  });
}

// --- Cross entropy ---

// Rows may have any width, so their elements are taken one by one.
__global__ void cross_entropy_kernel(const float* logits, const std::uint32_t* targets, float scale, std::size_t rows,
                                     float* losses, Out gradient) {
  const std::size_t width = gradient.count / rows;
  each_piece(rows, [&](std::size_t row) {
    const float *const x = logits + row * width, expected = x[targets[row]];
    float mine = -FLT_MAX, total = 0;  // not -infinity, because the difference of two is no number
    for (std::size_t i = threadIdx.x; i < width; i += threads) {
      if (x[i] > mine) {
        total = total * expf(mine - x[i]) + 1.0f;
        mine = x[i];
      } else {
        total += expf(x[i] - mine);
      }
    }
    const float most = join_team(mine, threads, [](float a, float b) { return fmaxf(a, b); });
    total = sum_of_team(total * expf(mine - most), threads);
    const float factor = 1.0f / total;
    for (std::size_t i = threadIdx.x; i < width; i += threads) {
      const float share = factor * expf(x[i] - most);
      store(Pack<1>{scale * (i == targets[row] ? share - 1.0f : share)}, gradient, row * width + i);
    }
    if (threadIdx.x == 0) losses[row] = logf(total) - (expected - most);
  });
}

// --- Launches ---

void check(cudaError_t status, std::string_view what) {
  require(status == cudaSuccess, status == cudaErrorMemoryAllocation ? Code::device_memory : Code::cuda_call,
          [&] { return Problem{.what = "cannot " + std::string(what) + ": " + cudaGetErrorString(status)}; });
}

void check(cublasStatus_t status, std::string_view what) {
  require(status == CUBLAS_STATUS_SUCCESS, Code::cuda_call,
          [&] { return Problem{.what = "cannot " + std::string(what) + ": " + cublasGetStatusString(status)}; });
}

// Kernels register themselves before main(), so that all can be loaded at once: CUDA loads a kernel at its first launch, and may
// wait for all work of the GPU meanwhile. Beside a collective of NCCL, that could be a deadlock between ranks.
std::vector<const void*>& all_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

template <auto kernel>
inline const bool is_registered = (all_kernels().push_back(reinterpret_cast<const void*>(kernel)), true);

void check_packs(std::size_t width, const void* data = nullptr) {
  const bool fits = width % packed == 0 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  require(fits, Code::unaligned, [&] {
    return Problem{.what = "cannot compute on a GPU: rows of " + std::to_string(width) + " elements are not aligned",
                   .needed = "a multiple of 8 elements, at a multiple of 16 bytes"};
  });
}

template <class Byte>
Elements<Byte> argument(const BasicView<Byte>& view) {
  check_packs(view.count(), view.data());
  require(view.dtype() == DType::fp32 || view.dtype() == DType::bf16, Code::wrong_dtype, [&] {
    return Problem{.what = "cannot compute on a GPU in " + std::string(name(view.dtype())), .needed = "fp32 or bf16"};
  });
  return {view.data(), view.count(), view.dtype()};
}
template <class T>
const T& argument(const T& other) {
  return other;
}

cudaDataType type_of(const ConstView& view) { return view.dtype() == DType::fp32 ? CUDA_R_32F : CUDA_R_16BF; }
cublasOperation_t direction(const ConstMatrix& matrix) { return matrix.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }

int whole(std::size_t count) {
  require(count <= INT32_MAX, Code::wrong_size, [&] {
    return Problem{.what = "cannot compute on a GPU: a matrix is too large",
                   .needed = "at most " + std::to_string(INT32_MAX) + " rows or columns",
                   .available = std::to_string(count)};
  });
  return static_cast<int>(count);
}

// Selects its GPU in the calling thread, and leaves it selected.
class GpuMaths : public Maths {
 public:
  explicit GpuMaths(std::size_t number) : gpu_(choose(number)) {
    select();
    for (const void* const kernel : all_kernels()) {
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, kernel), "load a kernel");
    }
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "make a stream");
    stream_.reset(stream);
    cublasHandle_t handle = nullptr;
    check(cublasCreate(&handle), "start cuBLAS");
    cublas_.reset(handle);
    check(cublasSetStream(handle, stream), "give cuBLAS a stream");
    check(cublasSetMathMode(handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION), "make cuBLAS add in fp32");
    load_products();
  }
  ~GpuMaths() override { cudaSetDevice(gpu_); }  // the members end there

  std::optional<int> gpu() const override { return gpu_; }
  StreamHandle stream() const override { return stream_.get(); }
  std::string library() const override {
    int version = 0;
    check(cublasGetVersion(cublas_.get(), &version), "read the version of cuBLAS");
    const auto number = [&](int unit) { return std::to_string(version / unit % 100); };
    return "cuBLAS " + number(10000) + "." + number(100) + "." + number(1);
  }

  std::shared_ptr<std::byte> allocate(std::size_t bytes, bool on_host) override {
    select();
    if (on_host) return pin(std::max<std::size_t>(bytes, 1));
    void* memory = nullptr;
    check(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)),
          "allocate " + std::to_string(bytes) + " bytes of a GPU");
    return {static_cast<std::byte*>(memory), [gpu = gpu_](std::byte* allocated) {
              cudaSetDevice(gpu);
              cudaFree(allocated);
            }};
  }

  void copy(const ConstView& from, const View& to) override {
    select();
    check(cudaMemcpyAsync(to.data(), from.data(), from.bytes(), cudaMemcpyDefault, stream()), "copy to or from a GPU");
  }
  void wait() override { check(cudaStreamSynchronize(stream()), "wait for a GPU"); }

  // cuBLAS stores matrices by columns. Ours are by rows, so they are its transposes: it computes to^T = b^T a^T.
  void multiply(const Product& product) override {
    const auto& [a, b, to, add] = product;
    if (to.transposed) return multiply({.a = b.transpose(), .b = a.transpose(), .to = to.transpose(), .add = add});
    select();
    const float one = 1.0f, begin = add ? 1.0f : 0.0f;
    check(cublasGemmEx(cublas_.get(), direction(b), direction(a), whole(to.columns), whole(to.rows), whole(a.columns),
                       &one, b.memory.data(), type_of(b.memory), whole(b.stride), a.memory.data(), type_of(a.memory),
                       whole(a.stride), &begin, to.memory.data(), type_of(to.memory), whole(to.stride),
                       CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "multiply matrices");
  }

  void embed(const Tokens& tokens, const ConstView& table, const View& to) override {
    check_packs(to.count() / tokens.count);
    launch<embed_kernel>(blocks_of(to.count()), tokens, table, to);
  }

  void embed_backward(const Tokens& tokens, const ConstView& gradient, const View& table_gradient) override {
    const std::size_t width = gradient.count() / tokens.count;
    check_packs(width);
    launch<embed_backward_kernel>(tokens.count * blocks_of(width), tokens, gradient, table_gradient);
  }

  void rms_norm(const Norm& norm, const View& to) override {
    const NormRows rows = rows_of(norm);
    launch<rms_norm_kernel>(rows.blocks(), rows, to);
  }

  void rms_norm_backward(const Norm& norm, const ConstView& gradient, const View& weight_gradient,
                         const View& x_gradient, bool add) override {
    constexpr std::size_t most_blocks = 512;
    const NormRows rows = rows_of(norm);
    const std::size_t blocks = std::min(rows.blocks(), most_blocks), teams = rows.teams(blocks);
    float* const sums = scratch(teams * rows.width());
    launch<rms_norm_backward_kernel>(blocks, rows, gradient, sums, x_gradient, add);
    launch<add_rows_kernel>(divide_up(rows.width(), threads / warp), sums, std::min(teams, rows.rows()),
                            weight_gradient);
  }

  void rotate(const View& x, std::size_t head_width, const ConstView& angles, std::size_t row_width,
              bool back) override {
    check_packs(head_width);
    launch<rotate_kernel>(blocks_of(x.count()), x, head_width, angles, row_width, back ? -1.0f : 1.0f);
  }

  void attention(const Attention& of) override {
    AttentionMemory memory = memory_of(of);
    memory.new_sums = of.sums.as<float>().data();
    attend<Wanted::output>(memory, of.output);
  }

  void attention_backward(const Attention& of, const ConstView& gradient, const View& query_gradient,
                          const View& key_gradient, const View& value_gradient) override {
    AttentionMemory memory = memory_of(of);
    float* const along = scratch(of.sums.count());
    launch<along_kernel>(divide_up(of.sums.count(), threads / warp), memory, ConstView(of.output), gradient, along);
    memory.gradient = argument(gradient).data;
    memory.sums = of.sums.as<float>().data();
    memory.along = along;
    attend<Wanted::query_gradient>(memory, query_gradient);
    attend<Wanted::key_gradient>(memory, key_gradient);
    attend<Wanted::value_gradient>(memory, value_gradient);
  }

  void swiglu(const ConstView& gate, const ConstView& up, const View& to) override {
    launch<swiglu_kernel>(blocks_of(to.count()), gate, up, to);
  }

  void swiglu_backward(const ConstView& gate, const ConstView& up, const View& gradient,
                       const View& up_gradient) override {
    launch<swiglu_backward_kernel>(blocks_of(gradient.count()), gate, up, gradient, up_gradient);
  }

  void cross_entropy(const ConstView& logits, const std::uint32_t* targets, float scale, const View& losses,
                     const View& gradient) override {
    launch<cross_entropy_kernel>(losses.count(), logits.as<float>().data(), targets, scale, losses.count(),
                                 losses.as<float>().data(), Out{gradient.data(), gradient.count(), gradient.dtype()});
  }

 private:
  struct End {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
    void operator()(cublasHandle_t handle) const { cublasDestroy(handle); }
  };

  static int choose(std::size_t number) {
    int gpus = 0;
    const cudaError_t status = cudaGetDeviceCount(&gpus);
    require(status == cudaSuccess && gpus > 0, Code::no_cuda_device, [&] {
      return Problem{.what = std::string("cannot compute on a GPU: ") + cudaGetErrorString(status), .needed = "a GPU"};
    });
    return static_cast<int>(number % static_cast<std::size_t>(gpus));
  }

  void select() const { check(cudaSetDevice(gpu_), "choose a GPU"); }

  // Copies of pinned memory do not wait.
  std::shared_ptr<std::byte> pin(std::size_t bytes) const {
    constexpr std::align_val_t page{4096};
    const std::shared_ptr<std::byte> memory(static_cast<std::byte*>(::operator new(bytes, page)),
                                            [](std::byte* allocated) { ::operator delete(allocated, page); });
    check(cudaHostRegister(memory.get(), bytes, cudaHostRegisterPortable), "pin " + std::to_string(bytes) + " bytes");
    return {memory.get(), [memory, gpu = gpu_](std::byte* pinned) {
              cudaSetDevice(gpu);
              cudaDeviceSynchronize();
              cudaHostUnregister(pinned);
            }};
  }

  template <auto kernel, unsigned block_threads = threads, class... Arguments>
  void launch(std::size_t blocks, const Arguments&... arguments) {
    if (blocks == 0 || !is_registered<kernel>) return;
    select();
    cudaLaunchConfig_t config{};
    config.gridDim = dim3{static_cast<unsigned>(std::min<std::size_t>(blocks, INT32_MAX)), 1, 1};
    config.blockDim = dim3{block_threads, 1, 1};
    config.stream = stream();
    check(cudaLaunchKernelEx(&config, kernel, argument(arguments)...), "launch a kernel");
  }

  // The first product makes CUDA load cuBLAS, which may wait for all work of the GPU, as loading a kernel does.
  void load_products() {
    constexpr std::size_t side = 16, all = side * side;
    const View memory(reinterpret_cast<std::byte*>(scratch(3 * all)), 3 * all, DType::bf16);
    const auto matrix = [&](std::size_t number) { return Matrix(memory.part(number * all, all), side); };
    check(cudaMemsetAsync(memory.data(), 0, memory.bytes(), stream()), "clear memory of a GPU");
    multiply({.a = matrix(0), .b = matrix(1), .to = matrix(2)});
    wait();
  }

  // Returns memory that stays valid until the next call.
  float* scratch(std::size_t count) {
    if (scratch_count_ < count) {
      scratch_ = {};
      scratch_ = allocate(count * sizeof(float), false);
      scratch_count_ = count;
    }
    return reinterpret_cast<float*>(scratch_.get());
  }

  static NormRows rows_of(const Norm& norm) { return {argument(norm.x), argument(norm.weight), norm.epsilon}; }

  static AttentionMemory memory_of(const Attention& of) {
    const auto number = [](std::size_t count) { return static_cast<unsigned>(whole(count)); };
    check_packs(of.head_width);
    return {.sequences = number(of.sequences()),
            .context = number(of.context),
            .heads = number(of.heads),
            .kv_heads = number(of.kv_heads),
            .head_width = number(of.head_width),
            .scale = 1.0f / std::sqrt(static_cast<float>(of.head_width)),
            .query = argument(of.query).data,
            .key = argument(of.key).data,
            .value = argument(of.value).data};
  }

  template <Wanted wanted>
  void attend(const AttentionMemory& memory, const View& to) {
    to.dtype() == DType::fp32 ? attend<wanted, float>(memory, to) : attend<wanted, bf16>(memory, to);
  }

  // Takes the narrowest tiles that are as wide as a head.
  template <Wanted wanted, class T, unsigned width = 64>
  void attend(const AttentionMemory& memory, const View& to) {
    if constexpr (width > 256) {
      fail(Code::unsupported, {.what = "cannot compute attention on a GPU: the heads are too wide",
                               .needed = "at most 256 elements",
                               .available = std::to_string(memory.head_width)});
    } else if (memory.head_width > width) {
      attend<wanted, T, 2 * width>(memory, to);
    } else {
      launch<attention_kernel<T, width, wanted>, attention_threads>(memory.pieces(wanted), memory, to.as<T>().data());
    }
  }

  int gpu_;
  std::unique_ptr<std::remove_pointer_t<cudaStream_t>, End> stream_{};
  std::unique_ptr<std::remove_pointer_t<cublasHandle_t>, End> cublas_{};
  std::shared_ptr<std::byte> scratch_{};
  std::size_t scratch_count_ = 0;
};

}  // namespace

std::unique_ptr<Maths> gpu_maths(std::size_t number) { return std::make_unique<GpuMaths>(number); }

}  // namespace ballast::llama
