// A group of ranks, found through the environment of a launcher or a store that Python has.
#include "zero/comm/connect.h"

#include <pybind11/stl.h>

#include "python/bindings/bindings.h"

namespace ballast::python {
namespace {

// A Python object with set(key, value) and get(key); torch.distributed.Store is one. Jobs of different names may share it.
class PythonStore : public KeyValueStore {
 public:
  PythonStore(py::object store, const std::string& job) : store_(std::move(store)), prefix_(job + "/") {}

  void set(const std::string& key, const std::string& value) override {
    const py::gil_scoped_acquire held;
    store_.attr("set")(prefix_ + key, value);
  }

  std::string get(const std::string& key) override {
    const py::gil_scoped_acquire held;
    py::list keys;
    keys.append(prefix_ + key);
    store_.attr("wait")(keys);
    return store_.attr("get")(prefix_ + key).cast<std::string>();  // bytes, or text
  }

 private:
  py::object store_;
  std::string prefix_;
};

struct Rendezvous {
  py::object store;
  std::optional<std::size_t> rank;
  std::optional<std::size_t> size;
  std::string host;  // of rank 0, as the others reach it
  std::string job;
  std::optional<double> timeout;  // seconds
};

Launch launch_of(const Rendezvous& where) {
  const bool told =
      where.rank && where.size;  // then a launcher's environment, which may be another group's, is not read
  Launch launch = told ? Launch{.rank = *where.rank, .size = *where.size} : launch_from(Environment());
  if (!where.host.empty()) launch.hub.host = where.host;
  if (!where.job.empty()) launch.job = where.job;
  return launch;
}

// The communicator with what it works with. Calls that wait for other ranks let Python's other threads run.
class Group {
 public:
  explicit Group(const Rendezvous& where) : backend_(kernels::cpu_backend()) {
    ConnectOptions options{.backend = *backend_, .accounts = accounts_, .launch = launch_of(where)};
    std::optional<PythonStore> store;
    if (!where.store.is_none()) options.store = &store.emplace(where.store, options.launch->job);
    if (where.timeout) options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(*where.timeout * 1e3));
    const py::gil_scoped_release released;
    communicator_ = ballast::connect(options);
  }
  Group(const Group&) = delete;
  ~Group() { close(); }

  Communicator& communicator() const {
    require(communicator_ != nullptr, Code::bad_argument,
            [] { return Problem{.what = "the group was closed", .remedy = "Use it inside of its `with` block."}; });
    return *communicator_;
  }

  void barrier() const {
    Communicator& group = communicator();
    const py::gil_scoped_release released;
    group.barrier();
  }

  std::vector<std::int64_t> all_reduce(std::vector<std::int64_t> values) const {
    Communicator& group = communicator();
    const py::gil_scoped_release released;
    group.all_reduce(values);
    return values;
  }

  void abort(const std::string& reason) const {
    Communicator& group = communicator();
    const py::gil_scoped_release released;
    group.abort(reason);
  }

  void close() {
    const py::gil_scoped_release released;
    communicator_.reset();
  }

 private:
  std::unique_ptr<kernels::Backend> backend_;
  MemoryAccounts accounts_;
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace

void bind_connect(py::module_& module) {
  py::class_<Rendezvous>(module, "Rendezvous")
      .def(py::init<py::object, std::optional<std::size_t>, std::optional<std::size_t>, std::string, std::string,
                    std::optional<double>>(),
           py::kw_only(), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("host"), py::arg("job"),
           py::arg("timeout"));
  py::class_<Group>(module, "Group")
      .def(py::init<const Rendezvous&>(), py::arg("where"))
      .def_property_readonly("rank", [](const Group& group) { return group.communicator().rank(); })
      .def_property_readonly("size", [](const Group& group) { return group.communicator().size(); })
      .def("barrier", &Group::barrier)
      .def("all_reduce", &Group::all_reduce, py::arg("values"))
      .def("abort", &Group::abort, py::arg("reason"))
      .def("close", &Group::close);
}

}  // namespace ballast::python
