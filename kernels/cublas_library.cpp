// cuBLAS is loaded when it is first needed, so that the library works without it, and starts without waiting for it.
#include <ballast/error.h>

#include <dlfcn.h>
#include <fmt/format.h>

#include "kernels/cublas.h"

// cublas_v2.h defines its functions' names as those of the second version, which are the library's symbols.
#define BALLAST_SYMBOL(function) BALLAST_TEXT(function)
#define BALLAST_TEXT(text) #text

namespace ballast::kernels {
namespace {

const std::string library_name = fmt::format("libcublas.so.{}", CUBLAS_VER_MAJOR);

[[noreturn]] void refuse(std::string_view reason) {
  fail(Code::no_cublas, {.what = fmt::format("cannot multiply matrices on a GPU: {} cannot be loaded", library_name),
                         .available = std::string(reason)});
}

template <class Function>
void find(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr) refuse(fmt::format("it has no {}", symbol));
}

Cublas load() {
  void* const library = dlopen(library_name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    refuse(reason == nullptr ? "an unknown reason" : reason);
  }
  Cublas loaded{};
  find(library, BALLAST_SYMBOL(cublasCreate), loaded.create);
  find(library, BALLAST_SYMBOL(cublasDestroy), loaded.destroy);
  find(library, BALLAST_SYMBOL(cublasSetStream), loaded.set_stream);
  find(library, BALLAST_SYMBOL(cublasSetWorkspace), loaded.set_workspace);
  find(library, BALLAST_SYMBOL(cublasSetMathMode), loaded.set_math_mode);
  find(library, BALLAST_SYMBOL(cublasGetStatusString), loaded.status_string);
  find(library, BALLAST_SYMBOL(cublasGemmStridedBatchedEx), loaded.multiply);
  return loaded;
}

}  // namespace

const Cublas& cublas() {
  static const Cublas loaded = load();
  return loaded;
}

}  // namespace ballast::kernels
