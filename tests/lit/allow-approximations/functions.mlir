// A function may be an approximation where nothing but bytes is made of its results.
// RUN: gossamer-opt %s -p allow-approximations --split-input-file | filecheck %s
#all = affine_map<(t, n) -> (t, n)>
#token = affine_map<(t, n) -> (t, 0)>

// CHECK-LABEL: func.func @bytes(
// CHECK:         math.erf %{{.*}} fastmath<afn> : f32
func.func @bytes(%x: tensor<?x8xf32>) -> tensor<?x8xi8> {
  %y = "kernel.map"() ({
    %0 = "kernel.read"(%x) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = math.erf %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) : () -> tensor<?x8xf32>
  %max = "kernel.max"() ({
    %0 = "kernel.read"(%y) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = math.absf %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {size = 8 : i64} : () -> tensor<?x1xf32>
  %q = "kernel.map"() ({
    %0 = "kernel.read"(%y) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = "kernel.read"(%max) {map = #token} : (tensor<?x1xf32>) -> f32
    %2 = arith.divf %0, %1 : f32
    %3 = arith.fptosi %2 : f32 to i8
    "kernel.yield"(%3) : (i8) -> ()
  }) : () -> tensor<?x8xi8>
  return %q : tensor<?x8xi8>
}

// -----
#all = affine_map<(t, n) -> (t, n)>

// A sum of zeros tells only what is no number.
// CHECK-LABEL: func.func @numbers(
// CHECK:         math.erf %{{.*}} fastmath<afn> : f32
func.func @numbers(%x: tensor<?x8xf32>) -> (tensor<?x1xf32>, tensor<?x8xi8>) {
  %none = arith.constant 0.0 : f32
  %y = "kernel.map"() ({
    %0 = "kernel.read"(%x) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = math.erf %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) : () -> tensor<?x8xf32>
  %told = "kernel.sum"() ({
    %0 = "kernel.read"(%y) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = arith.mulf %0, %none : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) {size = 8 : i64} : () -> tensor<?x1xf32>
  %q = "kernel.map"() ({
    %0 = "kernel.read"(%y) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = arith.fptosi %0 : f32 to i8
    "kernel.yield"(%1) : (i8) -> ()
  }) : () -> tensor<?x8xi8>
  return %told, %q : tensor<?x1xf32>, tensor<?x8xi8>
}

// -----
#all = affine_map<(t, n) -> (t, n)>

// What else reads them gets them as exact as they are.
// CHECK-LABEL: func.func @both(
// CHECK:         math.erf %{{.*}} : f32
// CHECK-NOT:     afn
func.func @both(%x: tensor<?x8xf32>) -> (tensor<?x8xi8>, tensor<?x8xf32>) {
  %y = "kernel.map"() ({
    %0 = "kernel.read"(%x) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = math.erf %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) : () -> tensor<?x8xf32>
  %q = "kernel.map"() ({
    %0 = "kernel.read"(%y) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = arith.fptosi %0 : f32 to i8
    "kernel.yield"(%1) : (i8) -> ()
  }) : () -> tensor<?x8xi8>
  return %q, %y : tensor<?x8xi8>, tensor<?x8xf32>
}

// -----
#all = affine_map<(t, n) -> (t, n)>

// Behind sums of integers, one instruction may multiply and add.
// CHECK-LABEL: func.func @integers(
// CHECK:         arith.mulf %{{.*}} fastmath<contract> : f32
// CHECK:         arith.addf %{{.*}} fastmath<contract> : f32
// CHECK:         arith.mulf %{{[^ ]*}}, %{{[^ ]*}} : f32
func.func @integers(%x: tensor<?x8xi8>, %w: tensor<8x8xi8, "bytewindows(reduction=1, rows=16, sorted=1)">,
                    %r: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = "kernel.read"(%r) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = arith.sitofp %sum : i32 to f32
    %2 = arith.mulf %1, %0 : f32
    %3 = arith.addf %2, %0 : f32
    "kernel.yield"(%3) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "lookup8", tile = [32, 32]}
     : (tensor<?x8xi8>, tensor<8x8xi8, "bytewindows(reduction=1, rows=16, sorted=1)">) -> tensor<?x8xf32>
  %z = "kernel.map"() ({
    %0 = "kernel.read"(%y) {map = #all} : (tensor<?x8xf32>) -> f32
    %1 = arith.mulf %0, %0 : f32
    "kernel.yield"(%1) : (f32) -> ()
  }) : () -> tensor<?x8xf32>
  return %z : tensor<?x8xf32>
}
