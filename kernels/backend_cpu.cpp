#include <oneapi/tbb/info.h>

#include "kernels/backend.h"
#include "kernels/cpu.h"

namespace ballast::kernels {
namespace {

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(CpuOptions options)
      : cpu_{walks_for(options.isa),
             Threads(options.threads > 0 ? options.threads : oneapi::tbb::info::default_concurrency())} {}

  void update(const UpdateTile& tile, std::span<const Run> runs, std::span<const GroupStep> groups) override {
    kernels::update(cpu_, tile, runs, groups);
  }

 private:
  Cpu cpu_;
};

}  // namespace

std::unique_ptr<Backend> cpu_backend(CpuOptions options) { return std::make_unique<CpuBackend>(options); }

}  // namespace ballast::kernels
