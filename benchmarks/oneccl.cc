// oneCCL's allreduce of float32 in host memory as C functions, for adapters.py; knows no Python.
//
// A failed call prints why and returns non-zero, or no event.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <oneapi/ccl.hpp>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

std::unique_ptr<ccl::communicator> communicator;

template <typename Function>
int guarded(Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "oneCCL: %s\n", error.what());
    return 1;
  }
}

// The address of rank 0's store, through a file that appears when it is complete.
ccl::shared_ptr_class<ccl::kvs> meet(int rank, const std::string& path) {
  if (rank == 0) {
    auto store = ccl::create_main_kvs();
    const auto address = store->get_address();
    const std::string unfinished = path + ".unfinished";
    std::ofstream(unfinished, std::ios::binary).write(address.data(), address.size());
    if (std::rename(unfinished.c_str(), path.c_str()) != 0) throw std::runtime_error("rename");
    return store;
  }
  for (int tries = 0; access(path.c_str(), R_OK) != 0; ++tries) {
    if (tries == 6000) throw std::runtime_error("rank 0 hasn't come within 60 s");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ccl::kvs::address_type address;
  std::ifstream(path, std::ios::binary).read(address.data(), address.size());
  return ccl::create_kvs(address);
}

}  // namespace

extern "C" {

int oneccl_init(int rank, int size, const char* path) {
  return guarded([&] {
    ccl::init();
    communicator =
        std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, meet(rank, path)));
  });
}

const char* oneccl_version() {
  static const std::string version = ccl::get_library_version().full;
  return version.c_str();
}

void* oneccl_submit(float* data, size_t count) {
  void* event = nullptr;
  guarded([&] {
    event = new ccl::event(ccl::allreduce(data, data, count, ccl::reduction::sum, *communicator));
  });
  return event;
}

int oneccl_wait(void* event) {
  return guarded([&] { std::unique_ptr<ccl::event>(static_cast<ccl::event*>(event))->wait(); });
}

int oneccl_barrier() {
  return guarded([] { ccl::barrier(*communicator).wait(); });
}

int oneccl_close() {
  return guarded([] { communicator.reset(); });
}
}
