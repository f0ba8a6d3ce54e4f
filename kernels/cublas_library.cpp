#include <ballast/error.h>

#include <dlfcn.h>
#include <fmt/format.h>

#include "kernels/cublas.h"

// cublas_v2.h defines its functions' names as those of the second version, which are the library's symbols.
#define BALLAST_SYMBOL(function) BALLAST_TEXT(function)
#define BALLAST_TEXT(text) #text

namespace ballast::kernels {
namespace {

[[noreturn]] void refuse(const std::string& file, std::string_view reason) {
  fail(Code::no_cublas, {.what = fmt::format("cannot multiply matrices on a GPU: {} cannot be loaded", file),
                         .available = std::string(reason)});
}

class Library {
 public:
  explicit Library(const std::string& file) : file_(file), handle_(::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) refuse(file_, ::dlerror());
  }

  template <class Function>
  void find(const char* symbol, Function& function) const {
    function = reinterpret_cast<Function>(::dlsym(handle_, symbol));
    if (function == nullptr) refuse(file_, fmt::format("it has no {}", symbol));
  }

 private:
  const std::string& file_;
  void* handle_;
};

}  // namespace

Cublas load_cublas(const std::string& file) {
  const Library library(file);
  Cublas loaded{};
  library.find(BALLAST_SYMBOL(cublasCreate), loaded.create);
  library.find(BALLAST_SYMBOL(cublasDestroy), loaded.destroy);
  library.find(BALLAST_SYMBOL(cublasSetStream), loaded.set_stream);
  library.find(BALLAST_SYMBOL(cublasSetWorkspace), loaded.set_workspace);
  library.find(BALLAST_SYMBOL(cublasSetMathMode), loaded.set_math_mode);
  library.find(BALLAST_SYMBOL(cublasGetStatusString), loaded.status_string);
  library.find(BALLAST_SYMBOL(cublasGemmStridedBatchedEx), loaded.multiply);
  return loaded;
}

}  // namespace ballast::kernels
