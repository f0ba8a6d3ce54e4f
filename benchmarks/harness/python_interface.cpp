// Ballast's AdamW, its communicator and its drive tier as an extension of Python, so that suites can run them in turn with others,
// on memory that torch owns. It is for measurements only; the Python package does not use it. Formats and transports are numbers,
// in the order of their enumerations.
#include <ballast/optim.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "benchmarks/offload/stretch.h"
#include "benchmarks/offload/update.h"
#include "kernels/backend.h"
#include "kernels/runtime/buffer.h"
#include "kernels/state_access.h"
#include "optim/state_layout.h"
#include "optim/step.h"
#include "zero/comm/connect.h"

namespace {

namespace py = pybind11;
using namespace ballast;

using Address = std::uintptr_t;

std::byte* at(Address address) { return reinterpret_cast<std::byte*>(address); }

View view(Address memory, std::size_t count, int dtype) { return {at(memory), count, static_cast<DType>(dtype)}; }

// AdamW with torch's default options.
class AdamW {
 public:
  AdamW(int threads, int format, int dtype, std::size_t count)
      : backend_(kernels::cpu_backend({.threads = threads})),
        layout_({.format = static_cast<StateFormat>(format),
                 .parameter = static_cast<DType>(dtype),
                 .names = optim::AdamW::state},
                count) {}

  std::size_t state_bytes() const { return layout_.bytes(); }

  // Makes the next step. Before the first one, the state is zeros.
  void step(Address parameter, Address gradient, Address state) {
    TileMemory tile = layout_.tile(at(state));
    tile.parameter = at(parameter);
    tile.gradient = at(gradient);
    tile.gradient_dtype = tile.parameter_dtype;
    tile.rounding_stream = ++steps_;
    if (steps_ == 1) kernels::begin_master(tile, *backend_);
    const kernels::Run run{.begin = 0, .count = tile.count, .group = 0};
    const auto group = optim::at(optim::AdamW{}, {.number = steps_});
    backend_->update(tile, {&run, 1}, {&group, 1});
  }

 private:
  std::unique_ptr<kernels::Backend> backend_;
  optim::StateLayout layout_;
  std::uint64_t steps_ = 0;
};

// A member of the job that the environment names.
class Rank {
 public:
  explicit Rank(int transport)
      : communicator_(connect({.transport = static_cast<HostTransport>(transport)},
                              {.backend = *backend_, .accounts = accounts_})) {}

  // Returns memory that all ranks read in place, until the next call or the end.
  Address shared_memory(std::size_t bytes) {
    shared_ = Buffer();
    require(communicator_->shared_memory() != nullptr, Code::unsupported,
            [] { return Problem{.what = "cannot share memory: the communicator has none"}; });
    shared_ = allocate(accounts_, {.bytes = bytes, .owner = "shared", .allocator = communicator_->shared_memory()});
    return reinterpret_cast<Address>(shared_.data());
  }

  // `count` is of a rank's shard.
  void all_gather(Address mine, Address all, std::size_t count, int dtype) {
    communicator_->all_gather(view(mine, count, dtype), view(all, communicator_->size() * count, dtype));
  }
  void reduce_scatter(Address all, Address into, std::size_t count, int dtype) {
    communicator_->reduce_scatter(view(all, communicator_->size() * count, dtype), {at(into), count, DType::fp32});
  }

 private:
  std::unique_ptr<kernels::Backend> backend_ = kernels::cpu_backend({.threads = 1});
  MemoryAccounts accounts_{};
  std::unique_ptr<Communicator> communicator_;
  Buffer shared_{};  // declared after the communicator, so destroyed before it
};

}  // namespace

PYBIND11_MODULE(ballast_bench, module) {
  const py::call_guard<py::gil_scoped_release> released;
  module.def(
      "copy", [](Address to, Address from, std::size_t bytes) { std::memcpy(at(to), at(from), bytes); }, released);
  py::class_<AdamW>(module, "AdamW")
      .def(py::init<int, int, int, std::size_t>())
      .def("state_bytes", &AdamW::state_bytes)
      .def("step", &AdamW::step, released);
  py::class_<Rank>(module, "Rank")
      .def(py::init<int>(), released)
      .def("shared_memory", &Rank::shared_memory, released)
      .def("all_gather", &Rank::all_gather, released)
      .def("reduce_scatter", &Rank::reduce_scatter, released);
  py::class_<benchmarks::Stretch>(module, "Stretch")
      .def(py::init<const std::vector<std::string>&, std::size_t, std::size_t>(), released)
      .def("files", &benchmarks::Stretch::files)
      .def("bytes", &benchmarks::Stretch::bytes)
      .def("move", &benchmarks::Stretch::move, released);
  using Update = benchmarks::OffloadedUpdate;
  py::class_<Update>(module, "OffloadedUpdate")
      .def(py::init<const std::string&, std::size_t, std::size_t, bool>(), released)
      .def("gigabytes", &Update::gigabytes)
      .def("tiles", &Update::tiles)
      .def("tile_bytes", &Update::tile_bytes)
      .def("pipeline", &Update::pipeline, released)
      .def("without_seals", &Update::without_seals, released)
      .def("drive_alone", &Update::drive_alone, released);
}
