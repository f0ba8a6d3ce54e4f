#include "tests/emulated_cuda/torch/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <array>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/torch/device.h"

namespace emulated_torch {
namespace {

class GpuGenerator final : public c10::GeneratorImpl {
 public:
  GpuGenerator(int gpu, at::Generator drawn)
      : GeneratorImpl(c10::Device(device_type, static_cast<c10::DeviceIndex>(gpu)),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        drawn_(std::move(drawn)) {}

  void set_current_seed(std::uint64_t seed) override { drawn_.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { drawn_.set_offset(offset); }
  std::uint64_t get_offset() const override { return drawn_.get_offset(); }
  std::uint64_t current_seed() const override { return drawn_.current_seed(); }
  std::uint64_t seed() override { return drawn_.seed(); }
  void set_state(const c10::TensorImpl& state) override { drawn_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawn_.unsafeGetGeneratorImpl()->get_state();
  }

  const at::Generator& drawn() const { return drawn_; }

 private:
  GpuGenerator* clone_impl() const override { return new GpuGenerator(device_.index(), drawn_.clone()); }

  at::Generator drawn_;
};

TORCH_LIBRARY_FRAGMENT(emulated, library) {
  library.def("default_generator(int gpu) -> Generator?",
              [](std::int64_t gpu) { return default_generator(static_cast<int>(gpu)); });
}

}  // namespace

at::Generator new_generator(int gpu) {
  return at::make_generator<GpuGenerator>(gpu, at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
}

const at::Generator& default_generator(int gpu) {
  static const std::array<at::Generator, emulated::max_gpus> all = [] {
    std::array<at::Generator, emulated::max_gpus> made;
    for (int each = 0; each < emulated::max_gpus; ++each) {
      made[static_cast<std::size_t>(each)] = new_generator(each);
    }
    return made;
  }();
  return all.at(static_cast<std::size_t>(gpu < 0 ? current_gpu() : gpu));
}

at::Generator drawn_from(const at::Generator& of_gpu) {
  TORCH_CHECK(of_gpu.device().type() == device_type, "a generator of ", of_gpu.device(),
              " cannot draw on an emulated GPU");
  return static_cast<GpuGenerator*>(of_gpu.unsafeGetGeneratorImpl())->drawn();
}

}  // namespace emulated_torch
