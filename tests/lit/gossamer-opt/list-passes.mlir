// Our passes in the order in which a region meets them, with their options and defaults.
// RUN: gossamer-opt --list-passes | filecheck %s

// CHECK:      fuse-epilogue
// CHECK-NEXT:   {{[a-z]+}}
// CHECK:      schedule{schedule=kblock bits=512
// CHECK-NEXT:   decides how each `kernel.contract` is computed
// CHECK:      lower-to-llvm{{.*}}
