// Some tokens: they are the lanes, and each nonzero is in all of them.
// RUN: gossamer-opt %s -p 'expose-storage,lower-broadcast,canonicalize,cse' | filecheck %s

// A tile of 16 tokens: 30 columns of x are packed, filled up to whole vectors.
// CHECK-LABEL: func.func private @region_tile16(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi16>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[BIAS:[a-z0-9]*]]: memref<7xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         memref.view %{{.*}} : memref<?xi8> to memref<32x16xf32>

// Four nonzeros a step, each with a sum of its own; their values are one load, and so are their coordinates.
// CHECK:         scf.for %[[P:[a-z0-9]*]] = %{{.*}} step %c4 iter_args(%{{.*}}) -> (vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>) {
// CHECK-NEXT:      %[[V:.*]] = vector.load %[[VAL]][%[[P]]] : memref<?xf32>, vector<4xf32>
// CHECK-NEXT:      %[[REPEATED:.*]] = vector.shuffle %[[V]], %{{.*}} [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
// CHECK-NEXT:      %[[KEPT:.*]] = llvm.inline_asm "", "=v,0" %[[REPEATED]]
// CHECK-NEXT:      %[[C:.*]] = vector.load %[[CRD]][%[[P]]] : memref<?xi16>, vector<4xi16>
// CHECK-NEXT:      vector.bitcast %[[C]] : vector<4xi16> to vector<1xi64>
// CHECK:           vector.shuffle %[[KEPT]], %{{.*}} [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]
// CHECK-COUNT-4:   vector.fma
// CHECK:           scf.yield

// In the last block comes what the epilogue does to sums; then they are transposed and stored.
// CHECK:         memref.load %[[BIAS]]
// CHECK:         vector.maskedstore %[[OUT]]

// No more than 8 tokens are half a vector, whose loads leave time for one of each coordinate.
// CHECK-LABEL: func.func private @region_tile8(
// CHECK:         scf.for %[[P:[a-z0-9]*]] = %{{.*}} step %c4 iter_args
// CHECK:           memref.load %{{.*}}[%[[P]]] : memref<?xi16>
// CHECK-LABEL: func.func @region(
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "padded(reduction=1, columns=16)">, %bias: tensor<7xf32>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<7xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "broadcast", tile = [16]} : (tensor<?x30xf32>, tensor<7x30xf32, "padded(reduction=1, columns=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
