// The kernels for eight, four, two and one tokens.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-deltas,canonicalize,cse' --split-input-file --verify-diagnostics | filecheck %s

// What a lane needs first is on its way while x is staged. Of distances of four bits, a word has eight: its halves of bytes are
// quads. One instruction adds up to four of them, and a stored zero meets the column of zeros behind x.
// CHECK-LABEL: gpu.func @rows_t8(
// CHECK-SAME:    kernel.launch = {blocks = 3 : i64, shared = 8912 : i64, threads = 256 : i64, tokens = 8 : i64}
// CHECK:         vector.load {{.*}} vector<2xi32>
// CHECK-COUNT-2: vector.load {{.*}} {alignment = 16 : i64} : memref<?xf16>, vector<8xf16>
// CHECK:         scf.for
// CHECK:           vector.store {{.*}} : memref<2408xf16, #gpu.address_space<workgroup>>, vector<8xf16>
// CHECK:         gpu.barrier
// CHECK:         scf.for
// CHECK:           vector.load {{.*}} vector<2xi32>
// CHECK-COUNT-2:   vector.load {{.*}} vector<8xf16>
// CHECK:           arith.shrui
// CHECK-COUNT-4:   nvvm.dot.accumulate.4way
// CHECK:           arith.extf {{.*}} : f16 to f32
// CHECK:           arith.cmpf oeq
// CHECK:           arith.select {{.*}} : i32
// CHECK:           vector.load {{.*}} {alignment = 16 : i64} : memref<4816xi8, #gpu.address_space<workgroup>>, vector<16xi8>
// CHECK:           vector.fma {{.*}} : vector<8xf32>
// CHECK:         gpu.shuffle xor
// CHECK:         gpu.barrier
// CHECK:         vector.store {{.*}} : memref<?x40xf16>, vector<1xf16>
// CHECK-LABEL: gpu.func @rows_t4(
// CHECK-LABEL: gpu.func @rows_t2(
// CHECK-LABEL: gpu.func @rows_t1(
func.func @rows(%x: tensor<?x300xf16>, %w: tensor<40x300xf16, "deltas(reduction=1, bits=4)">) -> tensor<?x40xf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to f16
    "kernel.yield"(%0) : (f16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-deltas", tile = [8]} : (tensor<?x300xf16>, tensor<40x300xf16, "deltas(reduction=1, bits=4)">) -> tensor<?x40xf16>
  return %y : tensor<?x40xf16>
}

// -----

// Distances of eight bits are quads as they are.
// CHECK-LABEL: gpu.func @bytes_t8(
// CHECK:         vector.load {{.*}} vector<4xi32>
// CHECK-NOT:     arith.constant 252645135
func.func @bytes(%x: tensor<?x300xf16>, %w: tensor<40x300xf16, "deltas(reduction=1, bits=8)">) -> tensor<?x40xf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to f16
    "kernel.yield"(%0) : (f16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-deltas", tile = [8]} : (tensor<?x300xf16>, tensor<40x300xf16, "deltas(reduction=1, bits=8)">) -> tensor<?x40xf16>
  return %y : tensor<?x40xf16>
}

// -----

// expected-error@unknown {{tile [4] is not [8]}}
func.func @tile(%x: tensor<?x300xf16>, %w: tensor<40x300xf16, "deltas(reduction=1, bits=4)">) -> tensor<?x40xf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to f16
    "kernel.yield"(%0) : (f16) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-deltas", tile = [4]} : (tensor<?x300xf16>, tensor<40x300xf16, "deltas(reduction=1, bits=4)">) -> tensor<?x40xf16>
  return %y : tensor<?x40xf16>
}
