// Our passes with their options and defaults.
// RUN: gossamer-opt --list-passes | filecheck %s

// CHECK:      fuse-epilogue
// CHECK-NEXT:   {{[a-z]+}}
// CHECK:      lower-to-llvm{{.*}}
// CHECK:      schedule{schedule=broadcast bits=512
// CHECK-NEXT:   decides how each `kernel.contract` is computed
